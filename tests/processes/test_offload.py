"""Activations that wait in host memory change no bit, and are freed on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.choices import Offload, Recompute, ScheduleName
from app.config import MoEConfig, ParallelConfig, RecomputeConfig, Run, ScheduleConfig, TrainConfig
from tests.distributed import run_distributed
from tests.processes.recompute import steps
from tests.runs import make_run
from tests.tensors.activation_memory import DENSE

LARGE = dataclasses.replace(DENSE, num_layers=4)  # whose activations are above the smallest size
MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=64, first_k_dense=1)
MODELS = {"dense": LARGE, "moe": dataclasses.replace(LARGE, moe=MOE)}


def run_of(name: str, schedule: str = "auto", pp: int = 1, **recompute: Any) -> Run:
    return make_run(
        MODELS[name],
        train=TrainConfig(steps=20, seq_len=128, micro_batch=2, global_batch=8),
        parallel=ParallelConfig(dp=1, pp=pp),
        schedule=ScheduleConfig(ScheduleName(schedule)),
        recompute=RecomputeConfig(**recompute),
    )


CASES = [
    ("dense", dict(offload=(Offload.layers,))),
    ("moe", dict(offload=(Offload.layers,))),
    ("moe", dict(offload=(Offload.moe,))),
    ("dense", dict(offload=(Offload.attn,), phases=(Recompute.norm, Recompute.mlp_act))),
    ("moe", dict(offload=(Offload.attn, Offload.mlp), phases=(Recompute.moe,))),
    ("moe", dict(offload=(Offload.layers,), phases=tuple(Recompute))),
    ("dense", dict(offload=(Offload.layers,), full=True)),
    ("dense", dict(offload=(Offload.layers,), pp=2)),
    ("moe", dict(offload=(Offload.layers,), pp=2)),
    ("moe", dict(offload=(Offload.layers,), pp=2, schedule="zero_bubble_h1")),
    ("dense", dict(offload=(Offload.layers,), pp=2, full=True, partial_microbatches=1)),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_offloading_changes_no_bit(name: str, options: dict[str, Any]):
    run = run_of(name, **options)
    plain = dataclasses.replace(run, recompute=RecomputeConfig())
    assert run_distributed(steps, run.world_size, run) == run_distributed(
        steps, run.world_size, plain
    )
