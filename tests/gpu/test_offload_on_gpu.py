"""Activations that wait in pinned host memory, on a GPU: the same bits, and less of its memory."""

from __future__ import annotations

import dataclasses
import gc
from functools import cache

import pytest
import torch

from app.choices import Dtype, GraphImpl, Offload
from app.config import (
    CudaGraphConfig,
    ModelConfig,
    MoEConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.planner.plan import Plan
from tests.gpu.in_process import Trained, trained_alone
from tests.runs import make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DENSE = ModelConfig(
    num_layers=6,
    hidden_size=512,
    ffn_hidden_size=1024,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=512,
)
EXPERTS = MoEConfig(num_experts=8, top_k=2, ffn_hidden_size=256, first_k_dense=3)
MODELS = {"dense": DENSE, "moe": dataclasses.replace(DENSE, moe=EXPERTS)}
WHOLE, PARTS = (Offload.layers,), (Offload.attn, Offload.mlp)
EAGER, GRAPH = GraphImpl.none, GraphImpl.full_iteration
CASES = [
    ("dense", WHOLE, EAGER),
    ("dense", WHOLE, GRAPH),
    ("dense", PARTS, GRAPH),
    ("moe", WHOLE, EAGER),
    ("moe", WHOLE, GRAPH),
    ("moe", PARTS, EAGER),
]


def run_of(name: str, offload: tuple[Offload, ...], impl: GraphImpl) -> Run:
    return make_run(
        MODELS[name],
        train=TrainConfig(steps=20, seq_len=2048, micro_batch=2, global_batch=6),
        precision=PrecisionConfig(Dtype.bfloat16),
        recompute=RecomputeConfig(offload=offload),
        cuda_graph=CudaGraphConfig(impl, warmup_steps=2),
    )


def trained(run: Run) -> tuple[Trained, int]:
    """Numbers of six steps, and the most bytes of tensors that they had on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = trained_alone(run, steps=6, validates=3)
    return found, torch.cuda.max_memory_allocated() - before


plain = cache(trained)  # runs that offload nothing


@pytest.mark.parametrize(("name", "offload", "impl"), CASES, ids=str)
def test_offloading_changes_no_bit_and_frees_memory(
    name: str, offload: tuple[Offload, ...], impl: GraphImpl
):
    run, kept = run_of(name, offload, impl), run_of(name, (), impl)
    found, peak = trained(run)
    wanted, highest = plain(kept)
    assert found == wanted
    planned = Plan(kept).busiest.allocated - Plan(run).busiest.allocated
    assert highest - peak > planned / 2 > 0
