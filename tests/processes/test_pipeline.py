"""Every pipeline trains like one process: losses, gradient norms, all gradients and all parameters after three steps, fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from app.choices import ScheduleName
from app.config import ModelConfig, ParallelConfig, RecomputeConfig, Run, ScheduleConfig, TrainConfig
from app.engine.step import Validation
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.runs import (
    TINY,
    TINY_MOE,
    batches_of,
    engine_of,
    make_run,
    train_steps,
    whole_gradients,
    whole_parameters,
)

STEPS = 3
DEEP = dataclasses.replace(TINY, num_layers=12, moe=dataclasses.replace(TINY_MOE, first_k_dense=3, every_n=2))
MODELS = {"moe": DEEP, "dense": dataclasses.replace(DEEP, moe=None), "tied": dataclasses.replace(DEEP, tie_embeddings=True)}


def run_of(
    model: ModelConfig,
    mbs: int,
    schedule: str = "auto",
    group: int | None = None,
    partial: int | None = None,
    timeout_s: float = 100.0,
    **parallel: Any,
) -> Run:
    dp, recompute = parallel.get("dp", 1), RecomputeConfig(full=partial is not None, partial_microbatches=partial or 0)
    train = TrainConfig(steps=20, seq_len=16, micro_batch=2, global_batch=2 * mbs * dp)
    order = ScheduleConfig(ScheduleName(schedule), group, timeout_s=timeout_s)
    return make_run(model, parallel=ParallelConfig(**parallel), schedule=order, recompute=recompute, train=train)


def few_steps(rank: int, run: Run) -> tuple[list[tuple[float, float]], dict[str, Any], dict[str, Any]]:
    """Losses and norms of a few steps, then all gradients of the last step, and all parameters after it."""
    engine = engine_of(run, rank)
    losses = train_steps(run, engine, STEPS)
    gradients, parameters = whole_gradients(engine), whole_parameters(engine)
    return losses, *({name: value.numpy() for name, value in found.items()} for found in (gradients, parameters))


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


@pytest.mark.parametrize(("name", "choice"), sampled(CASES, 3))
def test_pipeline_equals_one_process(name: str, choice: dict[str, Any]):
    run = run_of(MODELS[name], **choice)
    seen, *expected = run_distributed(few_steps, 1, run_of(MODELS[name], choice["mbs"] * choice.get("dp", 1)))[0]
    for losses, *found in run_distributed(few_steps, run.world_size, run):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(seen), rtol=2e-5, atol=1e-6)
        for values, wanted in zip(found, expected, strict=True):
            assert values.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(torch.from_numpy(values[key]), torch.from_numpy(value), rtol=1e-4, atol=2e-5, msg=key)


def validated(rank: int, run: Run, counts: list[int]) -> list[tuple[float, int]]:
    """(loss, tokens) of validations of so many microbatches."""
    engine, batches = engine_of(run, rank), batches_of(run, 0, 0)
    return [Validation(engine, count)(batches[:count]) for count in counts]


@pytest.mark.parametrize("choice", [
    dict(mbs=6, pp=2, vpp=2),
    dict(mbs=6, pp=4, vpp=3, group=6),
    dict(mbs=6, pp=2, vpp=2, schedule="zero_bubble_v"),
])
def test_a_validation_of_any_length_equals_that_of_one_process(choice: dict[str, Any]):
    counts = [1, 2, 3, 5]
    wanted = run_distributed(validated, 1, run_of(MODELS["tied"], choice["mbs"]), counts)[0]
    run = run_of(MODELS["tied"], **choice)
    for found in run_distributed(validated, run.world_size, run, counts):
        assert found == [(pytest.approx(loss, rel=2e-5), tokens) for loss, tokens in wanted]
