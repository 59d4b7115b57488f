"""Every pipeline trains like one process: losses, gradient norms, all gradients and all
parameters after three steps, fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from app.choices import ScheduleName
from app.config import (
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from app.engine.build import Engine
from app.engine.pipeline.step import Validation
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.parity import OneProcess, alone, few_steps, here
from tests.rounding import expect_alike
from tests.runs import STEADY, TINY, TINY_MOE, batches_of, make_run

STEPS = 3
DEEP = dataclasses.replace(
    TINY, num_layers=12, moe=dataclasses.replace(TINY_MOE, first_k_dense=3, every_n=2)
)
MODELS = {
    "moe": DEEP,
    "dense": dataclasses.replace(DEEP, moe=None),
    "tied": dataclasses.replace(DEEP, tie_embeddings=True),
}


def run_of(
    model: ModelConfig,
    mbs: int,
    schedule: str = "auto",
    group: int | None = None,
    partial: int | None = None,
    timeout_s: float = 100.0,
    **parallel: Any,
) -> Run:
    dp, recompute = (
        parallel.get("dp", 1),
        RecomputeConfig(full=partial is not None, partial_microbatches=partial or 0),
    )
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2 * mbs * dp)
    order = ScheduleConfig(ScheduleName(schedule), group, timeout_s=timeout_s)
    sections = {"parallel": ParallelConfig(**parallel), "schedule": order, "recompute": recompute}
    return make_run(model, train=train, optim=STEADY, **sections)


CASES = [
    ("moe", dict(mbs=4, pp=2)),
    ("moe", dict(mbs=1, pp=2)),
    ("dense", dict(mbs=2, pp=2, schedule="gpipe")),
    ("tied", dict(mbs=4, pp=4)),
    ("moe", dict(mbs=8, pp=4)),
    ("moe", dict(mbs=2, pp=2, vpp=2)),
    ("tied", dict(mbs=5, pp=2, vpp=3, group=3)),
    ("dense", dict(mbs=8, pp=4, vpp=3)),
    ("moe", dict(mbs=4, pp=2, dp=2, ep=2)),
    ("tied", dict(mbs=4, pp=2, vpp=2, dp=2)),
    ("tied", dict(mbs=3, pp=4, first=1, last=3)),
    ("moe", dict(mbs=4, pp=2, layout="Et|t*6|t*5|L")),
    ("moe", dict(mbs=4, pp=2, schedule="zero_bubble_h1")),
    ("tied", dict(mbs=6, pp=4, schedule="zero_bubble_h1")),
    ("moe", dict(mbs=4, pp=2, dp=2, ep=2, schedule="zero_bubble_h1", partial=1)),
    ("tied", dict(mbs=4, pp=2, vpp=2, schedule="zero_bubble_v")),
    ("moe", dict(mbs=6, pp=4, schedule="zero_bubble_v", layout="Ett|t|tt|t|t|tt|t|ttL")),
    ("moe", dict(mbs=4, pp=2, vpp=2, partial=0)),
    ("dense", dict(mbs=3, pp=1, partial=0)),
]


@functools.cache
def one_process(name: str, mbs: int) -> OneProcess:
    return OneProcess.of(run_of(MODELS[name], mbs), STEPS)


@pytest.mark.parametrize(("name", "choice"), sampled(CASES, 3))
def test_pipeline_equals_one_process(name: str, choice: dict[str, Any]):
    run = run_of(MODELS[name], **choice)
    expected = one_process(name, choice["mbs"] * choice.get("dp", 1))
    for found in run_distributed(few_steps, run.world_size, run, STEPS):
        expected.expect(found)


Validated = tuple[dict[int, float], dict[int, int]]  # by microbatches: losses, tokens


def validated(engine: Engine, counts: list[int]) -> Validated:
    """Validations of so many microbatches."""
    batches = batches_of(engine.plan.run, 0, 0)
    found = {count: Validation(engine, count)(batches[:count]) for count in counts}
    return {n: loss for n, (loss, _) in found.items()}, {n: told for n, (_, told) in found.items()}


@pytest.mark.parametrize(
    "choice",
    [
        dict(mbs=6, pp=2, vpp=2),
        dict(mbs=6, pp=4, vpp=3, group=6),
        dict(mbs=6, pp=2, vpp=2, schedule="zero_bubble_v"),
    ],
)
def test_a_validation_of_any_length_equals_that_of_one_process(choice: dict[str, Any]):
    compute = functools.partial(validated, counts=[1, 2, 3, 5])
    plain, exact = alone(run_of(MODELS["tied"], choice["mbs"]), compute)
    run = run_of(MODELS["tied"], **choice)
    for losses, tokens in run_distributed(here, run.world_size, run, compute):
        expect_alike(losses, plain[0], exact[0])
        assert tokens == plain[1]
