"""A rank of a plan for 64 GPUs, rehearsed on one: peak memory against the plan."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from app.choices import Dtype
from app.config import ModelConfig, MoEConfig, ParallelConfig, PrecisionConfig, TrainConfig
from app.engine.rehearsal.rehearse import rehearse
from app.planner.plan import Plan
from tests.runs import make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = ModelConfig(
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_heads=16,
    num_kv_heads=16,
    vocab_size=32768,
    moe=MoEConfig(num_experts=32, top_k=4, ffn_hidden_size=512, shared_ffn_hidden_size=512),
)


@pytest.mark.parametrize("rank", [0, 63])
@pytest.mark.parametrize("dense", [False, True])
def test_peak_of_a_rank_of_64_is_as_planned(rank: int, dense: bool):
    run = make_run(
        dataclasses.replace(MODEL, moe=None) if dense else MODEL,
        parallel=ParallelConfig(tp=2, pp=4, dp=8, ep=1 if dense else 8),
        train=TrainConfig(seq_len=2048, micro_batch=1, global_batch=64, deterministic=False),
        precision=PrecisionConfig(Dtype.bfloat16),
    )
    plan, device = Plan(run), torch.device("cuda:0")
    gc.collect()  # engines of other tests
    with torch.cuda.stream(torch.cuda.Stream()):
        found = rehearse(plan, rank, device, steps=2)
    planned = plan.memory[found.pp_rank].allocated
    assert found.peak_of_step == pytest.approx(planned, rel=0.1)
    assert all(seconds >= 0 for seconds in found.seconds.values())
