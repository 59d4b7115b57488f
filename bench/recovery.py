"""How long a run takes from a kill to its next step, by part; and that it ends as one left alone.

    python bench/recovery.py [--kills 10] [--steps 400] [--seed 1] [--out FILE] [overrides …]

One rank under `python -m app.cli.torchrun --standalone --max-restarts=…`, with whole steps in a
graph (on a CPU, in what stands in for one), is killed at drawn moments: in a step, a validation, a
save, the capture of its graph, its own start-up, or by the death of its launcher. Each time:

    death noticed        from the kill to torchrun's line about it
    new process          from there to the begin of the next rank, by the system's clock, which
                         ticks a hundred times a second
    imports and plan, …  the parts of the start, as the run itself tells them
    told                 from there to the line on this program's side
    warm-up and capture  from the first step to the first one that a graph has done, which is not
                         part of the sum

Of a killed launcher the first part is the time to its rank's end, and the second one the start of
the next launcher, which this program begins at once: these kills are summed up apart.

Then losses, gradient norms and validations are compared bit by bit with those of a run that nobody
has killed, no step of a checkpoint may be lost, and nothing may run ten seconds later: otherwise
the exit code is 1. Prints medians and extremes; FILE has everything, also while it goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch

from app.cli.options.compose import load_overrides
from app.cli.options.messages import readable_errors
from app.cli.processes.parent import bound
from app.config import Run
from app.engine.files.checkpoints import CHECKPOINTS, newest_checkpoint, step_of
from app.engine.files.run_folder import read_metrics

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, RESULTS = ROOT / "train.py", ROOT / "bench" / "results"
KINDS = ("step", "save", "validation", "capture", "start-up", "launcher")
DEFAULTS = (
    "cuda_graph=full_iteration",
    "data=text",
    "data.path=app/**/*.py",
    "log=console",
    "log.verbose=true",
    "log.interval=1",
    "train.sample_tokens=0",
    "checkpoint.interval=20",
    "train.eval_interval=15",
    "train.eval_sequences=16",
    "resume=auto",
)
NUMBERS = ("step", "loss", "grad_norm", "tokens", "val_loss")  # of a row, which repeat bit for bit
STEP = re.compile(r"step (\d+)/\d+  loss ")
READY = re.compile(r"step (\d+)/\d+  ready after [\d.]+ s: (.+)")
NOTICED = re.compile(r"torchrun: .* starting the ranks again")
POLL_S = 0.002  # seconds between looks
PATIENCE_S = 90  # seconds for anything that is waited for
ORPHANS_S = 10  # seconds after which nothing may run
T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """When a process is killed."""

    kind: str  # one of KINDS
    step: int  # at the earliest; without meaning for capture and start-up
    later: float  # between 0 and 1: how far into what takes its time there


@dataclass
class Kill:
    """What has followed a kill. Times are seconds."""

    kind: str
    told: int | None = None  # newest step that the killed process had told
    committed: int | None = None  # step of the newest checkpoint then
    first: int | None = None  # step that was told next; None: killed again before
    parts: dict[str, float] = field(default_factory=dict)
    total: float | None = None  # from the kill to the next step
    capture: float | None = None  # from there to the first step done by a graph


class Attempts:
    """A launcher, its rank, and what both have said, each line with the time of its coming."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self.folder = folder
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": paths}
        self.process = subprocess.Popen(
            bound(command),
            cwd=ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[tuple[float, str]] = []
        assert self.process.stdout is not None
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def heard(self, pattern: re.Pattern[str], since: int) -> Iterator[tuple[float, re.Match[str]]]:
        """(time, match) of the lines from the n-th one on."""
        for when, line in self.lines[since:]:
            if found := pattern.match(line):
                yield when, found

    def rank(self) -> int | None:
        """Process id of the rank that runs now."""
        pids = running(self.folder)
        return next((pid for pid in pids if parent_of(pid) == self.process.pid), None)

    def wait(self, look: Callable[[], T | None]) -> T:
        """What `look` finds once it finds something."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := look()) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = "\n".join(line for _, line in self.lines[-20:])
                raise RuntimeError(f"the launcher has ended, or waits for long:\n{said}")
            time.sleep(POLL_S)
        return found


def running(folder: Path) -> list[int]:
    """Processes that have a run folder in their command line, but for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            named = f"run_dir={folder}".encode() in (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if named and int(path.name) != os.getpid():
            found.append(int(path.name))
    return found


def parent_of(pid: int) -> int | None:
    """Process id of the parent, None for a process that has ended."""
    fields = stat_of(pid)
    return int(fields[1]) if fields else None


def began(pid: int) -> float | None:
    """When a process began, on the monotonic clock."""
    fields = stat_of(pid)
    if fields is None:
        return None
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()


def stat_of(pid: int) -> list[str] | None:
    """Fields of proc_pid_stat(5) behind the program's name: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


class Killer:
    """Kills at one moment after the other, and notes what follows."""

    def __init__(
        self, run: Run, line: Sequence[str], folder: Path, note: Callable[[], None]
    ) -> None:
        self.run, self.line, self.folder, self.note = run, line, folder, note
        self.kills: list[Kill] = []
        self.start_s = 1.0  # about how long a start takes
        self.attempts = Attempts(line, folder)
        self._begin(None)

    def _begin(self, killed: int | None) -> None:
        """Wait for the process of the next attempt."""
        new = self.attempts.wait(lambda: pid if (pid := self.attempts.rank()) != killed else None)
        self.pid, self.since = new, len(self.attempts.lines)
        self.began = self.attempts.wait(lambda: began(self.pid))
        self.first: int | None = None

    def ready(self) -> None:
        """Wait for the first step, and note how long its parts have taken."""
        when, found = self.attempts.wait(lambda: next(self.attempts.heard(READY, self.since), None))
        self.first, self.ready_at = int(found[1]), when
        parts = {}
        for part in found[2].split(", "):
            name, _, seconds = part.rpartition(" ")
            parts[name] = float(seconds)
        self.start_s = sum(parts.values())
        if self.kills:
            kill = self.kills[-1]
            kill.first = self.first
            kill.parts |= {**parts, "told": when - self.began - self.start_s}
            kill.total = sum(kill.parts.values())
            self.note()

    def strike(self, moment: Moment) -> None:
        """Kill at a moment, and wait for the next process."""
        if moment.kind != "start-up":
            self.ready()
        self._await(moment)
        self._note_capture()
        newest, told = newest_checkpoint(self.folder), self._told()
        kill = Kill(moment.kind, told, newest and step_of(newest))
        victim = self.attempts.process.pid if moment.kind == "launcher" else self.pid
        said, killed = len(self.attempts.lines), time.monotonic()
        os.kill(victim, signal.SIGKILL)
        if moment.kind == "launcher":
            self.attempts.process.wait()
            noticed = self._without_orphans()
            self.attempts = Attempts(self.line, self.folder)
        else:
            heard = self.attempts.wait(lambda: next(self.attempts.heard(NOTICED, said), None))
            noticed = heard[0]
        self._begin(self.pid)
        kill.parts = {"death noticed": noticed - killed, "new process": self.began - noticed}
        self.kills.append(kill)
        print(f"kill {len(self.kills)} in {moment.kind}, after step {told}", flush=True)
        self.note()

    def _await(self, moment: Moment) -> None:
        warm = self.run.cuda_graph.warmup_steps
        match moment.kind:
            case "start-up":
                time.sleep(max(0.0, self.began + moment.later * self.start_s - time.monotonic()))
            case "capture":
                self._await_step((self.first or 0) + warm - 1)
                time.sleep(0.2 * moment.later)
            case "save":
                self._await_step(self._settled(moment.step))
                temporaries = self.folder / CHECKPOINTS
                self.attempts.wait(lambda: next(temporaries.glob(".step-*.tmp"), None))
                time.sleep(0.2 * moment.later)
            case "validation":
                step, interval = self._settled(moment.step), self.run.train.eval_interval
                self._await_step(-(-step // interval) * interval)
                time.sleep(0.02 * moment.later)
            case _:
                self._await_step(self._settled(moment.step))
                time.sleep(0.05 * moment.later)

    def _settled(self, step: int) -> int:
        """A step by which this attempt has captured its graph."""
        return max(step, (self.first or 0) + self.run.cuda_graph.warmup_steps + 2)

    def _await_step(self, step: int) -> None:
        self.attempts.wait(lambda: told if (told := self._told() or 0) >= step else None)

    def _steps(self) -> dict[int, float]:
        """When each step of this attempt was told."""
        return {int(found[1]): when for when, found in self.attempts.heard(STEP, self.since)}

    def _told(self) -> int | None:
        return max(self._steps(), default=None)

    def _note_capture(self) -> None:
        """Of the attempt that is about to end: how long its graph has taken."""
        if self.kills and self.first is not None:
            graphs = self._steps().get(self.first + self.run.cuda_graph.warmup_steps)
            self.kills[-1].capture = graphs and graphs - self.ready_at

    def _without_orphans(self) -> float:
        """When the last process of a killed launcher had gone. Raises RuntimeError for orphans."""
        deadline = time.monotonic() + ORPHANS_S
        while left := running(self.folder):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} outlive their launcher")
            time.sleep(POLL_S)
        return time.monotonic()

    def finish(self) -> int:
        """Let the run come to its end; returns its exit code."""
        self.ready()
        code = self.attempts.process.wait()
        self._note_capture()
        self._without_orphans()
        return code


def draw_moments(kills: int, run: Run, seed: int) -> list[Moment]:
    """Every kind in turn, in a drawn order, at rising steps."""
    draw = random.Random(seed)
    kinds = [KINDS[nth % len(KINDS)] for nth in range(kills)]
    draw.shuffle(kinds)
    # The last ones leave room for the warm-up of the attempts behind them.
    width = 0.8 * run.steps / kills
    steps = [int(width * (nth + draw.random())) for nth in range(kills)]
    return [Moment(kind, step, draw.random()) for kind, step in zip(kinds, steps, strict=True)]


def summary(kills: Sequence[Kill]) -> dict[str, tuple[float, float, float]]:
    """(median, least, largest) seconds of each part, of the sum, and of what comes then."""
    whole = [kill for kill in kills if kill.total is not None]
    rows = [
        {**kill.parts, "kill to next step": kill.total, "warm-up and capture": kill.capture}
        for kill in whole
    ]
    places: dict[str, int] = {}  # not all have all parts
    for row in rows:
        for place, name in enumerate(row):
            places[name] = max(place, places.get(name, 0))
    names = sorted(places, key=lambda name: places[name])
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {
        name: (round(statistics.median(seconds), 3), round(min(seconds), 3), round(max(seconds), 3))
        for name, seconds in found.items()
        if seconds
    }


def faults(killer: Killer, alone: Path) -> list[str]:
    """What is not as promised, a line each."""
    kills = killer.kills
    found = [
        f"kill {nth}: step {kill.committed} was committed, and step {kill.first} came next"
        for nth, kill in enumerate(kills, 1)
        if kill.first is not None and kill.first <= (kill.committed or 0)
    ]
    rows, expected = (numbers(folder) for folder in (killer.folder, alone))
    if rows != expected:
        both = zip(rows, expected, strict=False)
        different = next((row for row, other in both if row != other), None)
        found.append(f"{len(rows)} rows instead of {len(expected)}, or others, first {different}")
    return found


def numbers(folder: Path) -> list[tuple[Any, ...]]:
    """What each row of a run has of NUMBERS."""
    rows = [tuple(row.get(name) for name in NUMBERS) for row in read_metrics(folder)]
    return sorted(rows, key=lambda row: (row[0], row[-1] is not None))


def launch_line(overrides: Sequence[str]) -> list[str]:
    """The command of one rank that is started again as often as it dies."""
    torchrun = [sys.executable, "-m", "app.cli.torchrun", "--standalone", "--nproc-per-node=1"]
    return [*torchrun, "--max-restarts=1000", str(SCRIPT), *overrides]


def by_victim(kills: Sequence[Kill]) -> dict[str, list[Kill]]:
    """Kills of ranks, and of launchers."""
    return {
        "rank": [kill for kill in kills if kill.kind != "launcher"],
        "launcher": [kill for kill in kills if kill.kind == "launcher"],
    }


def write_report(out: Path, killer: Killer, found: Sequence[str] | None = None) -> None:
    """Write what there is to say; without `found` it is not over."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    said = {
        "device": device,
        "torch": torch.__version__,
        "overrides": list(killer.line[killer.line.index(str(SCRIPT)) + 1 :]),
        **{f"seconds_{who}": summary(kills) for who, kills in by_victim(killer.kills).items()},
        "kills": [asdict(kill) for kill in killer.kills],
        "faults": found,
    }
    out.write_text(json.dumps(said, indent=1) + "\n")


def measure(
    run: Run, overrides: Sequence[str], work: Path, moments: Sequence[Moment], out: Path
) -> int:
    """Train twice, and kill one of them; returns the exit code."""
    alone, killed = work / "alone", work / "killed"
    lines = {
        folder: launch_line((*overrides, f"data.cache_dir={work}/cache", f"run_dir={folder}"))
        for folder in (alone, killed)
    }
    subprocess.run(lines[alone], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print("left alone: trained", flush=True)
    note = partial(write_report, out)
    killer = Killer(run, lines[killed], killed, note=lambda: note(killer))
    for moment in moments:
        killer.strike(moment)
    code = killer.finish()
    found = [*faults(killer, alone), *([f"the run ends with {code}"] if code else [])]
    note(killer, found)
    print_report(killer.kills, found)
    return 1 if found else 0


def print_report(kills: Sequence[Kill], found: Sequence[str]) -> None:
    """Medians and extremes of the parts, and what is not as promised."""
    for who, some in by_victim(kills).items():
        whole = sum(kill.total is not None for kill in some)
        if not whole:
            continue
        print(f"\n{f'{whole} kills of a {who}, s':>24}  {'median':>8}  {'least':>8}  {'most':>8}")
        for name, row in summary(some).items():
            print(f"{name:>24}  " + "  ".join(f"{round(seconds, 2) + 0.0:8.2f}" for seconds in row))
    again = sum(kill.total is None for kill in kills)
    print(f"\n{len(kills)} kills, of which {again} with another one before the next step")
    well = "rows bit-equal to a run left alone, no step of a checkpoint lost, no orphans"
    print("\n".join(found) or well)


def main() -> int:
    """Measure, print and save; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400, help="of the whole run")
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--out", type=Path, default=RESULTS / "recovery.json")
    args, given = parser.parse_known_args()
    overrides = (*DEFAULTS, *given, f"train.steps={args.steps}")
    with readable_errors("recovery.py", speak=True):
        run = load_overrides(overrides, 1)
    moments = draw_moments(args.kills, run, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        return measure(run, overrides, Path(work), moments=moments, out=args.out)


if __name__ == "__main__":
    sys.exit(main())
