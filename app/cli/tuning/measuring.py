"""Processes that measure combinations: several in a row per start of the ranks."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from app.advice.combinations import PlannedCombination
from app.cli.options.arguments import Typed
from app.cli.processes.environment import environment
from app.cli.processes.home import child_paths
from app.cli.processes.parent import bound
from app.cli.start.ranks import ranks_command
from app.cli.tuning.records import Measurement, State, read_record
from app.own_files import open_own, write_whole
from app.programs import PACKAGE

WORKER = PACKAGE / "cli" / "tuning" / "worker.py"
STEPS = 10  # timed steps of a combination
POLL_S = 0.2  # seconds between looks at the record
MOST_S = 300.0  # seconds that one combination may take: some wait for ranks that have failed
REASON = 300  # longest reason kept, characters
GRACE_S = 10.0  # seconds that processes have to end


@dataclass(frozen=True, slots=True)
class Bench:
    """Places and limits of measuring the combinations of a run."""

    typed: Typed
    world_size: int
    folder: Path
    record: Path
    head: tuple[str, ...]  # what the record is of
    steps: int = STEPS

    def measured(self) -> dict[str, Measurement]:
        """Return what was measured so far, by key. Raises ConfigError."""
        return read_record(self.record, self.head)

    def measure(
        self,
        combinations: Sequence[PlannedCombination],
        tell: Callable[[Measurement], None],
        most_s: float = MOST_S,
    ) -> None:
        """Measure combinations; every one of them has a line in the record afterwards.

        tell: called with each result. most_s: seconds after which one is stopped. Raises
        KeyboardInterrupt, after the processes have ended.
        """
        waiting = list(combinations)
        while waiting:
            process = self._start(waiting)
            try:
                overdue = self._follow(process, waiting, tell, most_s=most_s)
            finally:
                _end(process)
            self._take(waiting, tell)
            if waiting and (overdue or process.returncode):
                state = State.timed_out if overdue else State.failed
                code = f"its processes ended with exit code {process.returncode}"
                told = last_line(self.folder / "measuring.log") or code
                reason = f"took over {most_s:.0f} s" if overdue else told
                Measurement(waiting[0].key, state, reason).append(self.record)
                self._take(waiting, tell)

    def _start(self, combinations: Sequence[PlannedCombination]) -> subprocess.Popen[bytes]:
        task = self.folder / "task.json"
        listed = [
            {"key": each.key, "overrides": shlex.split(" ".join(each.overrides))}
            for each in combinations
        ]
        values = {
            "record": str(self.record.absolute()),
            "words": self.typed.words,
            "steps": self.steps,
            "combinations": listed,
        }
        write_whole(task, json.dumps(values))
        arguments, env = [str(task.absolute())], environment()
        settings = {**env, **child_paths(env)}
        command = bound([sys.executable, str(WORKER), *arguments])
        if self.world_size > 1:
            command, settings = ranks_command(self.world_size, str(WORKER), arguments, env=env)
        with os.fdopen(open_own(self.folder / "measuring.log", append=True), "ab") as log:
            return subprocess.Popen(
                command,
                env=settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches only this process
            )

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        waiting: list[PlannedCombination],
        tell: Callable[[Measurement], None],
        *,
        most_s: float,
    ) -> bool:
        """Wait for the end of the processes; return whether a combination took too long."""
        since = time.monotonic()
        while process.poll() is None:
            if self._take(waiting, tell):
                since = time.monotonic()
            if waiting and time.monotonic() - since > most_s:
                return True
            time.sleep(POLL_S)
        return False

    def _take(self, waiting: list[PlannedCombination], tell: Callable[[Measurement], None]) -> bool:
        """Tell of results that are new, and take them off those that wait."""
        found = self.measured()
        new = [each for each in waiting if each.key in found]
        for each in new:
            tell(found[each.key])
            waiting.remove(each)
        return bool(new)


def last_line(log: Path) -> str:
    """Return the last line of a log that says anything, by which processes explain their end."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip()[:REASON] for line in reversed(lines) if line.strip()), "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes if they still run; the ranks end with their launcher."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
