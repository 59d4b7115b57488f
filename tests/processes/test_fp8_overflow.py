"""Overflows in FP8: the same numbers on every rank and in every layout."""

from __future__ import annotations

import dataclasses

import pytest

from app.choices import Fp8Recipe, GraphImpl, ScheduleName
from app.config import (
    CudaGraphConfig,
    Fp8Config,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    Run,
    ScheduleConfig,
)
from app.engine.report.fp8 import Fp8Meter
from app.engine.step.step import TrainingStep, Validation
from tests.cases import chosen
from tests.distributed import run_distributed
from tests.processes.fp8_state import DENSE, WARMUP, WHOLE
from tests.runs import batches_of, engine_of, make_run

STEPS, INTERVAL = 4, 2
FOUR = dataclasses.replace(DENSE, num_layers=4)  # one for each of two stages of two ranks
Lines = tuple[list[dict[str, float]], str | None]


def run_of(recipe: Fp8Recipe = Fp8Recipe.delayed, **sections: object) -> Run:
    looks_back = {"amax_history": 1} if recipe is Fp8Recipe.delayed else {}
    fp8 = Fp8Config(recipe, **looks_back)
    optim = OptimConfig(lr=1e-2, warmup_steps=2, clip_norm=0.0)
    return make_run(FOUR, **({"precision": PrecisionConfig(fp8=fp8), "optim": optim} | sections))


def measured(rank: int, run: Run) -> Lines:
    """Return metrics lines of a run, and the advice at its end."""
    engine = engine_of(run, rank)
    step, meter, lines = TrainingStep(engine), Fp8Meter(engine), []
    validation = Validation(engine, 1)
    for number in range(STEPS):
        batches = batches_of(run, number, engine.groups.dp_rank)
        step(batches, 1e-2, 0.1)
        if (number + 1) % INTERVAL == 0:
            lines.append(meter.metrics())
        validation(batches[:1])
    engine.release()
    return lines, meter.advice()


STAGES = ParallelConfig(pp=2, vpp=2)
LAYERS = CudaGraphConfig(GraphImpl.local, warmup_steps=WARMUP)
ZERO_BUBBLE = ScheduleConfig(ScheduleName.zero_bubble_v)
LAYOUTS = {
    "full iteration": (1, {"cuda_graph": WHOLE}),
    "layers": (1, {"cuda_graph": LAYERS}),
    "pp2 vpp2": (2, {"parallel": STAGES}),
    "zero bubble": (2, {"parallel": STAGES, "schedule": ZERO_BUBBLE}),
}


@pytest.fixture(scope="module")
def one_rank() -> Lines:
    return run_distributed(measured, 1, run_of())[0]


def test_overflows_of_weights_are_counted(one_rank: Lines):
    lines, advice = one_rank
    shares = {f"fp8_overflow_{kind}" for kind in ("inputs", "weights", "grads")}
    for line in lines:
        assert line.keys() == shares | {"fp8_overflow_worst"}
        assert all(0 <= line[share] <= 1 for share in shares)
    assert lines[0]["fp8_overflow_weights"] > 0.1 and lines[0]["fp8_overflow_worst"] > 1
    assert advice is not None and "precision.fp8.margin=1" in advice


@pytest.mark.every(2)
@pytest.mark.parametrize("name", chosen(LAYOUTS, ["full iteration", "zero bubble"]))
def test_overflows_are_counted_alike_in_every_layout(one_rank: Lines, name: str):
    """Matrices are bit-identical in all layouts."""
    ranks, sections = LAYOUTS[name]
    for found in run_distributed(measured, ranks, run_of(**sections)):
        assert found == one_rank


@pytest.mark.full
@pytest.mark.parametrize("axis", chosen(["tp", "cp", "dp"], ["tp"]))
def test_ranks_with_parts_of_matrices_say_the_same(axis: str):
    first, second = run_distributed(measured, 2, run_of(parallel=ParallelConfig(**{axis: 2})))
    assert first == second and first[0][0]["fp8_overflow_weights"] > 0.1
