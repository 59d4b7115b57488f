"""Shared by test_pipeline.py and other tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from app.choices import ScheduleName
from app.config import (
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
    TrainConfig,
)
from tests.runs import STEADY, TINY, TINY_MOE, make_run

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
