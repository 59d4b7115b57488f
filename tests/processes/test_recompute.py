"""Whatever backward computes again, training is the same bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from app.choices import Balance, Recompute, ScheduleName
from app.config import ModelConfig, ParallelConfig, RecomputeConfig, Run, ScheduleConfig
from app.plan.recompute import RecomputeChoice
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.processes.layouts import MODELS
from tests.processes.recompute import steps
from tests.runs import make_run
from tests.tensors.models import make_chunk

PARTS = [(part,) for part in Recompute] + [tuple(Recompute)]
JITTER = dataclasses.replace(
    MODELS["moe"],
    moe=dataclasses.replace(MODELS["moe"].moe, jitter_eps=0.2, balance=Balance.sequence),
)


def run_of(model: ModelConfig, phases: tuple[Recompute, ...], **options: Any) -> Run:
    full, schedule = (
        options.pop("full", False),
        ScheduleConfig(ScheduleName(options.pop("schedule", "auto"))),
    )
    recompute = RecomputeConfig(
        full=full, phases=phases, partial_microbatches=int(full and bool(phases))
    )
    return make_run(
        model, recompute=recompute, schedule=schedule, parallel=ParallelConfig(dp=1, **options)
    )


OPTIONS = [
    dict(),
    dict(tp=2),
    dict(cp=2),
    dict(pp=2, schedule="zero_bubble_h1"),
    dict(pp=2, full=True),
]


@pytest.mark.every(5)
@pytest.mark.parametrize("options", sampled(OPTIONS, 3), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_all_parts_change_nothing(name: str, options: dict[str, Any]):
    run = run_of(MODELS[name], tuple(Recompute), **options)
    plain = run_of(
        MODELS[name], (), **{key: value for key, value in options.items() if key != "full"}
    )
    assert run_distributed(steps, run.world_size, run) == run_distributed(
        steps, run.world_size, plain
    )


SINGLY = sampled([(phases,) for phases in PARTS], 4)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "phases", SINGLY, ids=lambda phases: "+".join(part.value for part in phases)
)
def test_each_part_changes_nothing(phases: tuple[Recompute, ...]):
    for model in (MODELS["moe"], JITTER):
        assert run_distributed(steps, 1, run_of(model, phases)) == run_distributed(
            steps, 1, run_of(model, ())
        )


@pytest.mark.parametrize(
    "phases", PARTS, ids=lambda phases: "+".join(part.value for part in phases)
)
def test_nothing_is_held_once_backward_is_over(phases: tuple[Recompute, ...]):
    """Tensors left by a nested recomputed part would accumulate over layers."""
    chunk, tokens = make_chunk(MODELS["moe"]), torch.arange(32).view(2, 16)
    context = chunk.context(
        torch.arange(16).expand(2, 16), None, recompute=RecomputeChoice(frozenset(phases))
    )
    loss = chunk.loss(chunk(tokens, context).x, tokens, context)
    assert not context.recompute._sources
    loss.backward()
    assert not context.recompute._sources
