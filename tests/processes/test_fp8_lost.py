"""What products in eight bits lose: the same numbers on every rank, however a run is laid out."""

from __future__ import annotations

import pytest

from app.choices import Fp8Recipe, ScheduleName
from app.config import Fp8Config, OptimConfig, ParallelConfig, PrecisionConfig, Run, ScheduleConfig
from app.engine.pipeline.step import TrainingStep
from app.engine.report.eight_bits import Fp8Meter
from tests.distributed import run_distributed
from tests.processes.test_fp8_state import DENSE, WHOLE
from tests.runs import batches_of, engine_of, make_run

STEPS, INTERVAL = 6, 3
Lines = tuple[list[dict[str, float]], str | None]


def run_of(**sections: object) -> Run:
    fp8 = Fp8Config(Fp8Recipe.delayed, amax_history=1)
    optim = OptimConfig(lr=1e-2, warmup_steps=2, clip_norm=0.0)
    return make_run(DENSE, **({"precision": PrecisionConfig(fp8=fp8), "optim": optim} | sections))


def measured(rank: int, run: Run) -> Lines:
    """What lines of a run's metrics say, and what its end advises."""
    engine = engine_of(run, rank)
    step, meter, lines = TrainingStep(engine), Fp8Meter(engine), []
    for number in range(STEPS):
        step(batches_of(run, number, engine.groups.dp_rank), 1e-2, 0.1)
        if (number + 1) % INTERVAL == 0:
            lines.append(meter.metrics())
    engine.release()
    return lines, meter.advice()


STAGES = ParallelConfig(pp=2, vpp=2)
ZERO_BUBBLE = ScheduleConfig(ScheduleName.zero_bubble_v)
LAYOUTS = {
    "whole step": (1, {"cuda_graph": WHOLE}),
    "pp2 vpp2": (2, {"parallel": STAGES}),
    "zero bubble": (2, {"parallel": STAGES, "schedule": ZERO_BUBBLE}),
}


def test_overflows_are_counted_alike_in_every_layout():
    """Of matrices that are the same in all of them, to the last bit."""
    [(lines, advice)] = run_distributed(measured, 1, run_of())
    kinds = ("inputs", "weights", "grads")
    for line in lines:
        assert line.keys() == {f"fp8_overflow_{name}" for name in (*kinds, "worst")}
        assert all(0 <= line[f"fp8_overflow_{kind}"] <= 1 for kind in kinds)
    assert lines[0]["fp8_overflow_weights"] > 0.1 and lines[0]["fp8_overflow_worst"] > 1
    assert advice is not None and "precision.fp8.margin=1" in advice
    for name, (ranks, sections) in LAYOUTS.items():
        for found in run_distributed(measured, ranks, run_of(**sections)):
            assert found == (lines, advice), name


@pytest.mark.parametrize("axis", ["tp", "cp", "dp"])
def test_ranks_with_parts_of_matrices_say_the_same(axis: str):
    first, second = run_distributed(measured, 2, run_of(parallel=ParallelConfig(**{axis: 2})))
    assert first == second and first[0][0]["fp8_overflow_weights"] > 0.1
