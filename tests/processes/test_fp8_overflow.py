"""Lost entries in FP8: the same numbers on every rank and in every layout."""

from __future__ import annotations

import dataclasses
import re

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
Lines = tuple[list[dict[str, float]], str | None, str | None]


def run_of(recipe: Fp8Recipe = Fp8Recipe.delayed, **sections: object) -> Run:
    looks_back = {"amax_history": 1} if recipe is Fp8Recipe.delayed else {}
    fp8 = Fp8Config(recipe, count_entries=True, **looks_back)
    optim = OptimConfig(lr=1e-2, warmup_steps=2, clip_norm=0.0)
    return make_run(FOUR, **({"precision": PrecisionConfig(fp8=fp8), "optim": optim} | sections))


def measured(rank: int, run: Run) -> Lines:
    """Return metrics lines of a run, and the report and advice at its end."""
    engine = engine_of(run, rank)
    step, meter, lines = TrainingStep(engine), Fp8Meter(engine), []
    validation = Validation(engine, 1)
    for number in range(STEPS):
        batches = batches_of(run, number, engine.groups.dp_rank)
        at_interval = (number + 1) % INTERVAL == 0
        if at_interval:
            meter.begin()
        step(batches, 1e-2, 0.1)
        assert bool(engine.fp8.lost.counts_33.any()) == at_interval
        if at_interval:
            lines.append(meter.metrics())
        validation(batches[:1])
    engine.release()
    return lines, meter.lost_entries(), meter.advice()


STAGES = ParallelConfig(pp=2, vpp=2)
LAYERS = CudaGraphConfig(GraphImpl.local, warmup_steps=WARMUP)
ZERO_BUBBLE = ScheduleConfig(ScheduleName.zero_bubble_v)
LAYOUTS = {
    "full iteration": (1, {"cuda_graph": WHOLE}),
    "layers": (1, {"cuda_graph": LAYERS}),
    "pp2 vpp2": (2, {"parallel": STAGES}),
    "zero bubble": (2, {"parallel": STAGES, "schedule": ZERO_BUBBLE}),
}


def test_overflows_are_counted_alike_in_every_layout():
    """Matrices are bit-identical in all layouts; lost entries are those of one step."""
    [(lines, told, advice)] = run_distributed(measured, 1, run_of())
    kinds = ("inputs", "weights", "grads")
    shares = {f"fp8_{of}_{kind}" for of in ("overflow", "underflow", "clipped") for kind in kinds}
    for line in lines:
        assert line.keys() == shares | {"fp8_overflow_worst"}
        assert all(0 <= line[share] <= 1 for share in shares)
    assert lines[0]["fp8_underflow_grads"] > 0 and lines[0]["fp8_clipped_weights"] > 0
    assert lines[0]["fp8_overflow_weights"] > 0.1 and lines[0]["fp8_overflow_worst"] > 1
    assert advice is not None and "precision.fp8.margin=1" in advice
    of_all = re.findall(r"(\S+) % of (\w+)", told)
    assert [kind for _, kind in of_all] == [*kinds, *kinds] and "; were clipped: " in told
    shares_told = [f"fp8_{of}_{kind}" for of in ("underflow", "clipped") for kind in kinds]
    between = 0
    for share, (said, _) in zip(shares_told, of_all, strict=True):  # that of two steps together
        low, high = sorted(line[share] for line in lines)
        assert 0.99 * low <= float(said) / 100 <= 1.01 * high, share
        between += 1.1 * low < float(said) / 100 < 0.9 * high
    assert between >= 3
    for name, (ranks, sections) in LAYOUTS.items():
        for found in run_distributed(measured, ranks, run_of(**sections)):
            assert found == (lines, told, advice), name


@pytest.mark.every(2)
@pytest.mark.parametrize("recipe", [Fp8Recipe.current, Fp8Recipe.block])
def test_recipes_that_look_at_matrices_clip_nothing(recipe: Fp8Recipe):
    [(lines, told, advice)] = run_distributed(measured, 1, run_of(recipe))
    [again] = run_distributed(measured, 1, run_of(recipe, cuda_graph=WHOLE))
    assert again == (lines, told, advice) and advice is None
    assert told is not None and "became zero: " in told and "clipped" not in told
    for line in lines:
        assert line.keys() == {f"fp8_underflow_{kind}" for kind in ("inputs", "weights", "grads")}
        assert all(0 <= share < 0.05 for share in line.values()) and any(line.values())


@pytest.mark.parametrize("axis", chosen(["tp", "cp", "dp"], ["tp"]))
def test_ranks_with_parts_of_matrices_say_the_same(axis: str):
    first, second = run_distributed(measured, 2, run_of(parallel=ParallelConfig(**{axis: 2})))
    assert first == second and first[0][0]["fp8_overflow_weights"] > 0.1
