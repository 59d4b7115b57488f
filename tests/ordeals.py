"""Runs that are hit by signals, started again each time, and held to what is promised.

What is promised: a start resumes from the newest checkpoint that had been committed, or a later
one; ten seconds after the process that was started has ended, none of its others is left; a start
that nobody hits ends, with the records and the last checkpoint of a run left alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.engine.files.checkpoints import CHECKPOINTS, named_by_latest, newest_checkpoint
from app.engine.files.run_folder import has_ended
from app.engine.watchdog.watchdog import EXIT_STUCK
from tests.checkpoints import verify_checkpoint
from tests.kills import STEPS, STOPS, Case, Hit, Sight, committed, moment
from tests.programs import Forked, ForkedTree
from tests.training import ROOT, untimed

POLL_S = 0.004
ENDS_S = 120  # seconds after which a run that should end is stuck
ORPHANS_S = 10  # seconds that processes may outlive the one that was started
HANGS_S = 12  # schedule.timeout_s of a run in which a rank is to hang
STARTS_S = 0.4, 1.6, 8.0  # how long a start takes: one process, several, several that load torch
PR_SET_CHILD_SUBREAPER = 36
Result = tuple[list[dict[str, Any]], dict[str, str]]


def children(pid: int) -> list[int]:
    """Processes that a process has started, or that were handed to it, and that have not ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return [each for each in found if not _has_ended(each)]


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def below(pid: int) -> set[int]:
    """All processes that come from a process."""
    return {each for child in children(pid) for each in (child, *below(child))}


@contextmanager
def adopting() -> Iterator[None]:
    """Have processes whose parent dies become children of this one, where they can be found.

    At the end of the block none of those that began in it is left.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    others = below(os.getpid())
    try:
        yield
    finally:
        for pid in below(os.getpid()) - others:  # of a test that has failed
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


@dataclass
class Start:
    """One start of a run: a program, and what has happened to it."""

    program: Forked | subprocess.Popen[bytes]
    said: Path
    rank_depth: int  # processes from the program to its ranks
    hits: list[Hit] = field(default_factory=list)
    known: list[tuple[int, int]] = field(default_factory=list)  # step saved, bytes said until then
    dying: set[int] = field(default_factory=set)  # ranks that go down with the one that was killed
    cut_short: bool = False  # whoever should end its ranks was killed long before they would end

    @property
    def runs(self) -> bool:
        """Return whether its first process is alive."""
        return self.program.poll() is None

    def targets(self, hit: Hit) -> list[int]:
        """The processes that a hit may meet now."""
        depths = {"launcher": 0, "agent": max(0, self.rank_depth - 1), "rank": self.rank_depth}
        level = {self.program.pid} if self.runs else set()
        for _ in range(depths[hit.target]):
            level = {child for pid in level for child in children(pid)}
        return sorted(level - self.dying)


class Ordeal:
    """A run in one folder, from its first start to its end."""

    def __init__(self, case: Case, corpus: Sequence[str], folder: Path, *, fresh: bool) -> None:
        self.case, self.corpus, self.folder, self.fresh = case, corpus, folder, fresh
        self.others = below(os.getpid())
        self.starts, self.saved = 0, 0

    def endured(self, hits: Sequence[Hit]) -> list[Hit]:
        """Start it until it has come to its end; the hits that came too late for it."""
        left = list(hits)
        while not has_ended(self.folder):
            start = self._start(left)
            while left and self._meets(start, left[0]):
                start.hits.append(left.pop(0))
                if not self._resumes(start, left):
                    break
            self._settle(start)
        return left

    def _start(self, hits: Sequence[Hit]) -> Start:
        hangs = [f"schedule.timeout_s={HANGS_S}"] if hits and hits[0].kind == "hang" else []
        line = self.case.line(self.corpus, f"run_dir={self.folder}", *hangs)
        self.starts += 1
        print(f"start {self.starts}: python {shlex.join(line)}")
        said = self.folder.with_suffix(f".{self.starts}")
        make = subprocess.Popen if self.fresh and hits else ForkedTree
        with said.open("wb") as file:
            program = make(
                [sys.executable, *line],
                cwd=said.parent,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=file.fileno(),
                stderr=file.fileno(),
            )
        depth = 0 if self.case.ranks == 1 else 1 if self.case.restarts else 2
        return Start(program, said, depth, known=[(self.saved, 0)])

    def _meets(self, start: Start, hit: Hit) -> bool:
        """Wait for the moment of a hit and send it; False: the program has ended before."""
        kind = 0 if self.case.ranks == 1 else 2 if self.fresh else 1
        happens, seconds = moment(hit, Sight(self.folder), STARTS_S[kind])
        while not (happens() and start.targets(hit)):
            if not start.runs:
                return False
            time.sleep(POLL_S)
        time.sleep(seconds)
        start.known.append((committed(self.folder), start.said.stat().st_size))
        targets, ranks = start.targets(hit), below(start.program.pid)
        if not targets:
            return False
        target = targets[int(hit.draws[1] * len(targets))]
        print(f"  {hit}: process {target}, after step {committed(self.folder)} was saved")
        if self._restarts(hit):
            start.dying |= ranks
        if (hit.kind, hit.target) in (("kill", "launcher"), ("kill", "agent")):
            told = max((row["step"] for row in untimed(self.folder)), default=0)
            start.cut_short = told < STEPS // 2
        return _send(hit, target)

    def _restarts(self, hit: Hit) -> bool:
        return self.case.restarts and (hit.kind, hit.target) == ("kill", "rank")

    def _resumes(self, start: Start, hits: Sequence[Hit]) -> bool:
        """Return whether the next hit is on this start too."""
        last, follows = start.hits[-1], bool(hits) and hits[0].kind != "hang"
        stopping = last.number in STOPS and follows and hits[0].phase == "stopping"
        return follows and (last.kind == "pause" or self._restarts(last) or stopping)

    def _settle(self, start: Start) -> None:
        """Wait for the end of a start, and hold it to what is promised."""
        try:
            code = start.program.wait(ENDS_S)
        finally:
            print(f"  ended with {start.program.poll()}:\n{start.said.read_text()}")
        self._check_orphans(start)
        self._check_code(code, start)
        newest = newest_checkpoint(self.folder)
        self.saved = verify_checkpoint(newest)["step"] if newest else 0
        for step, size in start.known:
            assert self.saved >= step, f"step {step} had been saved, and is not there"
            for began in begun(start.said.read_bytes()[size:]):
                assert began >= step, f"step {step} had been saved, and a start began at {began}"

    def _check_orphans(self, start: Start) -> None:
        deadline = time.monotonic() + ORPHANS_S
        while (left := below(os.getpid()) - self.others) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert not left, f"orphans: {[command(pid) for pid in left]}"
        assert not (start.cut_short and has_ended(self.folder)), "orphans have trained to the end"
        reap()

    def _check_code(self, code: int, start: Start) -> None:
        kinds = {hit.kind for hit in start.hits} - {"pause"}
        apart = self.case.ranks > 1 and any(hit.target == "rank" for hit in start.hits)
        if not code or not kinds:
            assert not code and has_ended(self.folder)
        elif kinds == {"hang"}:
            assert code == EXIT_STUCK
        elif kinds <= {"stop", "interrupt"} and not apart:
            told = [hit.number for hit in start.hits]
            assert code in (os.EX_TEMPFAIL, 130, *(-n for n in told), *(128 + n for n in told))
            said = start.said.read_text()  # ranks outside of their steps do not wait for each other
            assert "interrupt" in kinds or "was ended by" in said or "Traceback" not in said
        else:
            assert code != 2, "refused"


def command(pid: int) -> str:
    """Number and command line of a process."""
    with suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')}"
    return f"{pid}"


def _send(hit: Hit, process: int) -> bool:
    """Send the hit; return whether the process was alive."""
    try:
        os.kill(process, hit.number)
        if hit.kind == "pause":
            time.sleep(0.3 * hit.draws[2])
            os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        return False
    return True


def reap() -> None:
    """Let adopted processes that have ended go."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def begun(said: bytes) -> list[int]:
    """The steps after which the starts that have printed this went on."""
    found = re.findall(rb"^ +resumed  (?:nothing|.*, after step (\d+)$)", said, re.MULTILINE)
    return [int(step or 0) for step in found]


def result(folder: Path) -> Result:
    """Return what a run has recorded, without times, in order, and the hashes of its last
    checkpoint.
    """
    files = verify_checkpoint(named_by_latest(folder / CHECKPOINTS))["files"]
    sums = {name: file["sha256"] for name, file in files.items()}
    return sorted(untimed(folder), key=lambda row: (row["step"], "val_loss" in row)), sums


class Undisturbed:
    """Results of layouts without any hit."""

    def __init__(self, corpus: Sequence[str], folder: Path) -> None:
        self.corpus, self.folder = corpus, folder
        self.found: dict[str, Result] = {}

    def of(self, case: Case) -> Result:
        """The result of a case's layout."""
        if case.layout not in self.found:
            run = self.folder / f"run-{len(self.found)}"
            alone = Ordeal(replace(case, restarts=False), self.corpus, run, fresh=False)
            assert alone.endured([]) == []
            self.found[case.layout] = result(run)
        return self.found[case.layout]


def endure(case: Case, undisturbed: Undisturbed, place: Path, *, fresh: bool = False) -> None:
    """Put runs through all hits of a case; those that come too late for one run meet another.

    `fresh`: programs that are hit are new interpreters; otherwise processes that have loaded torch.
    """
    expected, hits = undisturbed.of(case), list(case.hits)
    print(case)
    with adopting():
        for number in range(1 + 4 * len(case.hits)):
            run = Ordeal(case, undisturbed.corpus, place / f"run-{number}", fresh=fresh)
            hits = [hit.sooner() for hit in run.endured(hits)]
            assert result(run.folder) == expected
            if not hits:
                return
    raise AssertionError(f"came too late: {hits}")
