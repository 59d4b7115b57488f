"""Signals to processes of a run, drawn by a seed: which, to whom, and when."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from app.engine.files.checkpoints import CHECKPOINTS, LATEST, named_by_latest, step_of
from app.engine.files.run_folder import CONFIG, METRICS
from tests.training import ROOT

STEPS, SAVED, VALIDATED = 24, 6, 4  # steps of a run, and between its saves and its validations
SETTINGS = (
    "model.num_layers=2",
    f"train.steps={STEPS}",
    f"checkpoint.interval={SAVED}",
    f"train.eval_interval={VALIDATED}",
    "train.sample_tokens=8",
    "log=console",
    "resume=auto",
)
LAYOUTS = {
    1: ("",),
    2: ("dp=2", "dp=2 ep=2", "tp=2", "cp=2", "pp=2"),
    4: ("dp=2 tp=2", "pp=2 dp=2 ep=2"),
}
STOPS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Hit:
    """A signal to one of a run's processes at a drawn moment."""

    kind: str  # kill, stop, interrupt, hang (stopped for good) or pause
    number: signal.Signals
    target: str  # launcher, agent (torchrun's process below train.py) or rank
    phase: str
    draws: tuple[float, float, float]  # of step, process, seconds: 0 … 1

    def __str__(self) -> str:
        step, process, seconds = (round(each, 3) for each in self.draws)
        return (
            f"{self.number.name} ({self.kind}) {self.target} {process} {self.phase} {step} "
            f"{seconds}"
        )

    def sooner(self) -> Hit:
        """Return the same hit, sooner after the event that it follows."""
        step, process, seconds = self.draws
        return replace(self, draws=(step, process, seconds / 2))


def draw_hit(draw: random.Random, targets: Sequence[str], after: Hit | None) -> Hit:
    """Draw the next hit on a run with these processes."""
    kinds = {"kill": 10, "stop": 5, "interrupt": 2, "pause": 2, "hang": 2 * (len(targets) > 1)}
    (kind,) = draw.choices(list(kinds), list(kinds.values()))
    stop = draw.choice(STOPS[:2])
    signals = {"kill": signal.SIGKILL, "stop": stop, "interrupt": signal.SIGINT}
    target = "rank" if kind == "hang" else draw.choice(targets)
    phases = {"step": 3, "validation": 2, "save": 3}
    if kind != "hang":  # nobody watches a rank that has not met the others yet
        phases |= {"start": 2, "folder": 1, "end": 2}
    if kind == "kill" and after is not None and after.number in STOPS:
        phases |= {"stopping": 10}
    (phase,) = draw.choices(list(phases), list(phases.values()))
    draws = draw.random(), draw.random(), draw.random()
    return Hit(kind, signals.get(kind, signal.SIGSTOP), target, phase=phase, draws=draws)


@dataclass(frozen=True)
class Case:
    """A run and what happens to it."""

    seed: int
    ranks: int
    layout: str  # keys of `parallel`
    restarts: bool  # started by torchrun, which starts ranks again; otherwise by train.py
    asynchronous: bool
    hits: tuple[Hit, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.ranks} processes: {'; '.join(map(str, self.hits))}"

    def line(self, corpus: Sequence[str], *more: str) -> list[str]:
        """The command line, but for the interpreter."""
        parallel = (f"parallel.{word}" for word in self.layout.split())
        saving = f"checkpoint.asynchronous={str(self.asynchronous).lower()}"
        words = [str(ROOT / "train.py"), *corpus, *SETTINGS, *parallel, saving, *more]
        if not self.restarts:
            return words
        agent = ["-m", "app.cli.torchrun", "--standalone", "--max-restarts=9"]
        return [*agent, f"--nproc-per-node={self.ranks}", *words]


def draw_case(seed: int, ranks: int, count: int) -> Case:
    """A run of so many processes that is hit so many times."""
    draw = random.Random(seed)
    layout = LAYOUTS[ranks][seed % len(LAYOUTS[ranks])]
    restarts, asynchronous = ranks > 1 and draw.random() < 0.5, draw.random() < 0.7
    agent = () if restarts else ("agent",)
    targets = ("launcher", *agent, "rank", "rank") if ranks > 1 else ("rank",)
    hits: list[Hit] = []
    for _ in range(count):
        hits.append(draw_hit(draw, targets, hits[-1] if hits else None))
    return Case(seed, ranks, layout, restarts=restarts, asynchronous=asynchronous, hits=tuple(hits))


def draw_cases(counts: Sequence[tuple[int, Sequence[int]]], first_seed: int) -> list[Case]:
    """Cases with seeds of their own; `counts`: processes, and the number of hits of each case."""
    drawn = [(ranks, count) for ranks, cases in counts for count in cases]
    return [draw_case(first_seed + n, ranks, count) for n, (ranks, count) in enumerate(drawn)]


# In processes that have loaded torch, and as new programs, which are hit while they load it too.
FORKED = draw_cases(((1, [7] * 10), (2, [7] * 12), (4, [8] * 4)), first_seed=0)
FRESH = draw_cases(((1, [2]), (2, [2] * 5), (4, [2])), first_seed=100)


def counted(cases: Sequence[Case]) -> dict[str, Counter[str]]:
    """How many hits the cases have, by kind, target, phase and number of processes."""
    hits = [(case, hit) for case in cases for hit in case.hits]
    return {
        "kind": Counter(hit.kind for _, hit in hits),
        "target": Counter(hit.target for _, hit in hits),
        "phase": Counter(hit.phase for _, hit in hits),
        "processes": Counter(str(case.ranks) for case, _ in hits),
    }


# What can be seen of a run from outside.


def committed(folder: Path) -> int:
    """The step that `checkpoints/latest` names, 0 without one."""
    if not (folder / CHECKPOINTS / LATEST).exists():
        return 0
    return step_of(named_by_latest(folder / CHECKPOINTS))


class Sight:
    """Changes in a run folder from now on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics, self.config = self._file(METRICS), self._file(CONFIG)
        self.temporaries = self._temporaries()

    def _file(self, name: str) -> tuple[int, int] | None:
        with suppress(OSError):
            found = (self.folder / name).stat()
            return found.st_ino, found.st_mtime_ns if name == CONFIG else 0
        return None

    def _temporaries(self) -> set[tuple[str, int]]:
        found = set()
        for path in (self.folder / CHECKPOINTS).glob(".*.tmp"):
            with suppress(OSError):
                found.add((path.name, path.stat().st_ino))
        return found

    def begins(self) -> bool:
        """Return whether a start has written its configuration there."""
        return self._file(CONFIG) not in (None, self.config)

    def saves(self) -> bool:
        """Return whether a save has begun."""
        return bool(self._temporaries() - self.temporaries)

    def step(self) -> int:
        """The last step that a start has told."""
        if self._file(METRICS) in (None, self.metrics):
            return 0
        with (self.folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2000))  # the last lines
            steps = re.findall(rb'"step": (\d+)', file.read())
        return int(steps[-1]) if steps else 0


def moment(hit: Hit, sight: Sight, start_s: float) -> tuple[Callable[[], bool], float]:
    """Return the event that a hit follows, and the delay in seconds."""
    first = committed(sight.folder) + 1
    step = min(STEPS - 1, first + int(hit.draws[0] * (STEPS - first)))
    later = hit.draws[2]
    match hit.phase:
        case "start":
            return lambda: True, start_s * later
        case "stopping":
            return lambda: True, 0.15 * later
        case "folder":
            return sight.begins, 0.3 * later
        case "step":
            return lambda: sight.step() >= step, 0.05 * later
        case "validation":
            due = min(STEPS, -(-step // VALIDATED) * VALIDATED)
            return lambda: sight.step() >= due, 0.01 * later
        case "save":
            return sight.saves, 0.02 * later
        case _:
            return lambda: sight.step() >= STEPS, 0.4 * later
