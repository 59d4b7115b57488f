"""Runs whose ranks, supervisors, launchers and nodes are killed at drawn moments, with and without
copies in memory.

What is promised: the run, started again until it has ended, has the records and the last checkpoint
of one left alone, bit for bit. Ten seconds after the programs that were started have ended, none of
their processes is left, nor a temporary file, nor shared memory that nobody has open.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from app.engine.files.checkpoints import newest_checkpoint
from app.engine.files.run_folder import has_ended
from tests.checkpoints import verify_checkpoint
from tests.kills import SETTINGS, Hit, Sight, committed, moment
from tests.ordeals import (
    ORPHANS_S,
    POLL_S,
    STARTS_S,
    Result,
    adopting,
    below,
    children,
    command,
    reap,
    result,
)
from tests.ports import free_port
from tests.programs import Forked, ForkedTree
from tests.training import ROOT

LAYOUTS = {2: ("dp=2", "tp=2", "pp=2", "dp=2 ep=2"), 4: ("tp=2 dp=2 ep=2", "pp=2 dp=2 ep=2")}
LAUNCHES = {"own": 3, "torchrun": 2, "nodes": 3}  # by whom the ranks are started: weight
ENDS_S = 120.0  # seconds after which a run that should end is stuck
APART_S = 5.0  # seconds that a node outlives one that has failed; six times that without any rank
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # as in scripts/train.sbatch
SHARED = Path("/dev/shm")
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGTERM}


@dataclass(frozen=True)
class Setup:
    """How a run is started."""

    ranks: int
    layout: str  # keys of `parallel`
    launch: str  # own (by train.py), torchrun, or nodes (two of torchrun)
    memory: int | None  # `checkpoint.memory_every`; None: no copies

    def lines(self, corpus: Sequence[str], folder: Path) -> list[list[str]]:
        """The command lines, without the interpreter: one, or one of each node."""
        parallel = [f"parallel.{word}" for word in self.layout.split()]
        copies = [f"checkpoint.memory_every={self.memory}"] if self.memory else []
        words = [str(ROOT / "train.py"), *corpus, *SETTINGS, *parallel, *copies]
        words.append(f"run_dir={folder}")
        torchrun = ["-m", "app.cli.torchrun", "--max-restarts=9"]
        if self.launch == "own":
            return [words]
        if self.launch == "torchrun":
            return [[*torchrun, "--standalone", f"--nproc-per-node={self.ranks}", *words]]
        here, port = self.ranks // 2, free_port()
        torchrun += ["--nnodes=2", f"--nproc-per-node={here}", "--rdzv-backend=c10d"]
        torchrun += ["--rdzv-id=run", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
        words.append(f"parallel.gpus_per_node={here}")
        return [[*torchrun, f"--rdzv-conf=is_host={1 - node}", *words] for node in (0, 1)]

    @property
    def levels(self) -> list[str]:
        """The processes from a program to a rank, by what they are."""
        first = ["launcher", "agent"] if self.launch == "own" else ["agent"]
        return [*first, *(["supervisor"] if self.memory else []), "rank"]


def draw(seed: int, count: int) -> tuple[Setup, list[Hit]]:
    """A run, and what it is hit by."""
    chance = random.Random(seed)
    ranks = chance.choice((2, 2, 2, 4))
    (launch,) = chance.choices(list(LAUNCHES), list(LAUNCHES.values()))
    memory = chance.choice((None, 1, 1, 5))
    setup = Setup(ranks, chance.choice(LAYOUTS[ranks]), launch, memory)
    targets = {each: 1 for each in setup.levels} | {"rank": 4, "pair": 1}
    if launch == "nodes":
        targets |= {"node": 2}
    phases = {"start": 2, "folder": 1, "step": 5, "validation": 1, "save": 3, "end": 1, "soon": 2}
    hits = []
    for _ in range(count):
        (kind,) = chance.choices(("kill", "freeze", "stop"), (6, 2, 2))
        (target,) = chance.choices(list(targets), list(targets.values()))
        (phase,) = chance.choices(list(phases), list(phases.values()))
        draws = chance.random(), chance.random(), chance.random()
        hits.append(Hit(kind, SIGNALS[kind], target, phase=phase, draws=draws))
    return setup, hits


@dataclass
class Programs:
    """One start of a run: its programs, what they have said, and what has hit them."""

    setup: Setup
    running: list[Forked | subprocess.Popen[bytes]]
    said: Path
    hits: list[dict[str, Any]] = field(default_factory=list)
    told: str = ""  # signal that a node got after another one had ended

    @property
    def alive(self) -> bool:
        """Return whether any of the programs runs."""
        return any(each.poll() is None for each in self.running)

    @property
    def ending(self) -> bool:
        """Return whether a program has ended, without which no other continues."""
        return any(each.poll() is not None for each in self.running)

    def targets(self, target: str) -> list[list[int]]:
        """The groups of processes that a hit may meet now."""
        alive = [each.pid for each in self.running if each.poll() is None]
        if target == "node":
            return [[pid, *sorted(below(pid))] for pid in alive]
        levels = self.setup.levels
        found = alive
        for _ in range(levels.index("rank" if target == "pair" else target)):
            found = [child for pid in found for child in children(pid)]
        found.sort()
        if target != "pair":
            return [[pid] for pid in found]
        return [found[at : at + 2] for at in range(len(found) - 1)]


class Trial:
    """A run in one folder, started until it has ended."""

    def __init__(self, setup: Setup, corpus: Sequence[str], place: Path, *, fresh: bool) -> None:
        self.setup, self.corpus, self.fresh = setup, corpus, fresh
        self.folder, self.place = place / "run", place
        self.scratch = place / "tmp"
        self.scratch.mkdir(parents=True)
        self.others = below(os.getpid())
        self.shared = set(SHARED.iterdir())
        self.starts, self.records = 0, list[dict[str, Any]]()

    def endured(self, hits: Sequence[Hit]) -> list[Hit]:
        """Start it until it has ended; returns the hits that came too late for it."""
        left = list(hits)
        while not has_ended(self.folder):
            assert self.starts < 20 + 3 * len(hits), "starts do not end the run"
            programs = self._start()
            try:
                while left and self._meets(programs, left[0], STARTS_S[2 if self.fresh else 1]):
                    left.pop(0)
            finally:
                self._settle(programs)
        return left

    def _start(self) -> Programs:
        self.starts += 1
        make = subprocess.Popen if self.fresh else ForkedTree
        said = self.place / f"said-{self.starts}"
        env = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        with said.open("ab") as file:
            running = [
                make(
                    [sys.executable, *line],
                    cwd=self.place,
                    env={**os.environ, **env, **QUIET},
                    stdout=file.fileno(),
                    stderr=file.fileno(),
                    start_new_session=True,
                )
                for line in self.setup.lines(self.corpus, self.folder)
            ]
        return Programs(self.setup, running, said)

    def _meets(self, programs: Programs, hit: Hit, start_s: float) -> bool:
        """Wait for the moment of a hit and strike; False: the programs have ended before."""
        soon = hit.phase == "soon"
        phase = hit if not soon else replace(hit, phase="step" if not programs.hits else "start")
        happens, seconds = moment(phase, Sight(self.folder), start_s)
        deadline = time.monotonic() + ENDS_S
        while not (happens() and programs.targets(hit.target)):
            if programs.ending or time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        time.sleep(seconds)
        groups = programs.targets(hit.target)
        if not groups:
            return False
        group = groups[int(hit.draws[1] * len(groups))]
        size = programs.said.stat().st_size
        record = {"hit": str(hit), "saved": committed(self.folder), "said": size}
        print(f"  start {self.starts}: {hit}: {group}", flush=True)
        programs.hits.append(record)
        _strike(group, hit)
        return True

    def _settle(self, programs: Programs) -> None:
        """Wait for the end of a start, and hold it to what is promised."""
        try:
            self._await(programs)
            codes = [each.poll() for each in programs.running]
            self._record(programs, codes)
            assert None not in codes, f"stuck: {[command(p) for p in below(os.getpid())]}"
            assert 2 not in codes, "refused"
            assert programs.hits or codes == [0] * len(codes), "nobody has hit it"
            self._check_left()
        except AssertionError:
            print(programs.said.read_text(errors="replace"))
            raise

    def _check_left(self) -> None:
        deadline = time.monotonic() + ORPHANS_S
        while (left := below(os.getpid()) - self.others) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert not left, f"processes left: {[command(pid) for pid in left]}"
        reap()
        assert not [*self.scratch.iterdir()], f"temporary files: {[*self.scratch.rglob('*')]}"
        shared = [each for each in set(SHARED.iterdir()) - self.shared if not _is_open(each)]
        assert not shared, f"shared memory left: {shared}"
        if newest := newest_checkpoint(self.folder):
            verify_checkpoint(newest)

    def _await(self, programs: Programs) -> None:
        """Wait for the ends of all programs. As srun does, tell a node to end when another one has
        ended, or no rank has run for a while, and kill it later.
        """
        deadline, since = time.monotonic() + ENDS_S, time.monotonic()
        signals = [signal.SIGTERM, signal.SIGKILL] if len(programs.running) > 1 else []
        while programs.alive and time.monotonic() < deadline:
            time.sleep(10 * POLL_S)
            failed = any(each.poll() for each in programs.running)
            if not programs.ending and programs.targets("rank"):
                since = time.monotonic()
            if signals and time.monotonic() - since > (APART_S if failed else 6 * APART_S):
                programs.told, since = signals[0].name, time.monotonic()
                for each in programs.running:
                    each.send_signal(signals[0])
                signals.pop(0)

    def _record(self, programs: Programs, codes: Sequence[int | None]) -> None:
        said = programs.said.read_bytes()
        for record, after in zip(programs.hits, [*programs.hits[1:], None], strict=False):
            part = said[record.pop("said") : after["said"] if after else None]
            texts = {"in place": b"ranks started again: ", "again": b"starting the ranks again"}
            seen = [name for name, text in texts.items() if text in part]
            told = [f"other node {programs.told}"] if programs.told and not after else []
            ends = ["hit again" if after else f"ends {codes}"]
            self.records.append({**record, "outcome": [*seen, *(told or ends)]})


def _strike(group: Sequence[int], hit: Hit) -> None:
    """Send the signals of a hit; processes of a frozen group are killed some time later."""
    later = hit.kind == "freeze"
    # all of a group are frozen first: none may see another one die
    numbers = [hit.number] if hit.kind == "stop" else [signal.SIGSTOP, signal.SIGKILL]
    for number in numbers:
        for pid in group:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if later and number == signal.SIGSTOP:
            time.sleep(0.5 * hit.draws[2])


def _is_open(path: Path) -> bool:
    """Return whether some process has a file mapped or open, as segments of other programs are."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(path) in maps.read_text():
                return True
    return False


def numbers(folder: Path) -> Result:
    """What a run has recorded and saved, without its recoveries."""
    rows, sums = result(folder)
    return [row for row in rows if "recovery_s" not in row], sums


class Alone:
    """Results of layouts that nobody hits, each trained once."""

    def __init__(self, corpus: Sequence[str], place: Path) -> None:
        self.corpus, self.place = corpus, place
        self.found: dict[str, Result] = {}

    def of(self, setup: Setup) -> Result:
        """The result of a layout, started by train.py without copies in memory."""
        if setup.layout not in self.found:
            place = self.place / f"alone-{len(self.found)}"
            trial = Trial(
                replace(setup, launch="own", memory=None), self.corpus, place, fresh=False
            )
            assert trial.endured([]) == []
            self.found[setup.layout] = result(trial.folder)
        return self.found[setup.layout]


def endure(
    setup: Setup, hits: Sequence[Hit], alone: Alone, place: Path, *, fresh: bool = False
) -> Iterator[dict[str, Any]]:
    """Put runs through hits; those that come too late for one run meet another. Yields what has
    come of each hit.
    """
    expected = alone.of(setup)
    print(setup, flush=True)
    with adopting():
        for number in range(1 + 4 * len(hits)):
            trial = Trial(setup, alone.corpus, place / f"run-{number}", fresh=fresh)
            hits = [hit.sooner() for hit in trial.endured(hits)]
            for record in trial.records:
                yield {**asdict(setup), **record}
            assert numbers(trial.folder) == expected
            if not hits:
                return
    raise AssertionError(f"came too late: {hits}")
