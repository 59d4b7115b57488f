"""Causes that are injected into runs, found again by `app.planner.explain`."""

from __future__ import annotations

import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import Run
from app.data.feed import Batch, TrainFeed
from app.engine.files.run_folder import PLAN, TAKEN, read_metrics
from app.engine.report import host
from app.engine.report.summary import _remarks
from app.engine.run import trainer
from app.engine.step.engine import Engine
from app.planner.explain import DATA, LOAD, OTHERS, REST, Explained, Facts, explain
from app.planner.measured import SETTLING, Measurements
from app.planner.plan import Plan
from tests.distributed import run_distributed
from tests.training import composed, corpus_in, train_rank

WAIT_MS = 25.0  # of a microbatch for its data
STEPS = 9


class FakeClock:
    """Clock that only sleeps move, beside a microsecond per look: no machine is slow on it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = count(1)

    def __call__(self) -> float:
        return self.now + 1e-6 * next(self.looks)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def slow_to_read(rank: int, run: Run) -> list[tuple[str, int]]:
    """Train while every microbatch of rank 1, or of the only one, waits for its data.

    Returns device and first step of what is asked for at the end.
    """
    clock, read = FakeClock(), TrainFeed._microbatch
    asked: list[tuple[str, int]] = []

    def late(feed: TrainFeed, ordinal: int) -> Batch:
        clock.sleep(WAIT_MS / 1e3 * (rank == run.world_size - 1))
        return read(feed, ordinal)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        patch.setattr(TrainFeed, "_microbatch", late)
        patch.setattr(host.HostMeter, "lap", lambda self: (0.0, 1.0, 1.0))  # by no fake clock
        ends: Any = lambda plan, folder, facts, first_step: asked.append(  # noqa: E731
            (facts.device, first_step)
        )
        patch.setattr(trainer, "end_line", ends)
        train_rank(rank, run, {})
    return asked


def told_of(folder: Path, run: Run) -> tuple[Measurements, Explained]:
    rows = [row for row in read_metrics(folder) if row["step"] < STEPS]  # the last reads no more
    found = Measurements.of(rows, run)
    assert found is not None and found.first == SETTLING + 1
    facts = json.loads((folder / PLAN).read_text())[TAKEN]
    assert facts == {"device": "cpu", "slow_paths": {}}
    return found, explain(Plan(run), found, Facts(**facts))


def ms_of(told: Explained, name: str) -> float:
    (cause,) = (cause for cause in told.causes if cause.name == name)
    assert cause.ms is not None
    return cause.ms


def settings(tmp_path: Path, *typed: str, ranks: int = 1) -> Run:
    corpus = corpus_in(tmp_path / "corpus")
    words = (*corpus, "log.interval=2", f"train.steps={STEPS}", "train.eval_interval=0", *typed)
    return composed((*words, f"run_dir={tmp_path / 'run'}", "checkpoint.interval=0"), ranks)


def test_a_slow_loader_is_the_data_wait(tmp_path: Path):
    run = settings(tmp_path)
    assert run_distributed(slow_to_read, 1, run) == [[("cpu", 1)]]
    found, told = told_of(tmp_path / "run", run)
    per_step = run.num_microbatches * WAIT_MS
    assert ms_of(told, DATA) == pytest.approx(per_step, abs=0.1)
    assert found.step_ms == pytest.approx(per_step, abs=1)
    assert told.largest.name == DATA and abs(ms_of(told, REST)) < 1


@pytest.mark.full
def test_a_slow_loader_of_another_rank_is_found(tmp_path: Path):
    run = settings(tmp_path, "parallel.dp=2", ranks=2)
    run_distributed(slow_to_read, 2, run)
    _, told = told_of(tmp_path / "run", run)
    assert ms_of(told, DATA) == pytest.approx(run.num_microbatches * WAIT_MS, abs=0.1)
    assert all(row.get("data_wait_ms", 0.0) < 1 for row in read_metrics(tmp_path / "run"))


def test_the_line_on_the_pace_stands_before_advice():
    assert [*_remarks("steps took 2 ms", ["try it"])] == [
        "Pace: steps took 2 ms",
        "Next time: try it",
    ]
    assert [*_remarks(None, [])] == []


def on_one_rank(rank: int, run: Run) -> None:
    """Train while routers choose nothing but experts of rank 0, and others hold the cores."""
    build = trainer.Trainer.__init__

    def skewed(self: trainer.Trainer, engine: Engine, *others: Any, **named: Any) -> None:
        with torch.no_grad():
            for _, router in engine.named_routers():
                router.bias_E[: len(router.bias_E) // 2] += 100.0
        build(self, engine, *others, **named)

    def lap(self: host.HostMeter) -> tuple[float, float, float]:
        return 0.008 * (rank + 1), 1.0, 8.0  # of two steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "__init__", skewed)
        patch.setattr(host.HostMeter, "lap", lap)
        train_rank(rank, run, {})


def test_a_skewed_router_and_other_processes_are_found(tmp_path: Path):
    """All tokens go to one of two ranks. Its host has 8 busy cores, 2 of them with the run."""
    moe = ("model.moe.score=sigmoid", "model.moe.bias_update_rate=1e-6")
    run = settings(tmp_path, "parallel.ep=2", "parallel.dp=2", *moe, ranks=2)
    run_distributed(on_one_rank, 2, run)
    found, told = told_of(tmp_path / "run", run)
    assert found.rank_load == 2.0 and found.host_others == 6.0
    assert ms_of(told, LOAD) > 0
    assert ms_of(told, OTHERS) == pytest.approx(8.0 * 6 / 8)
