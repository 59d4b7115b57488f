"""Transformer Engine's attention on a GPU: beside fp64, in a fixed order, in graphs.

Shapes: B sequences, S queries, K keys, N query heads, G key/value heads, H head width.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import AttentionBackendKind, Dtype, GraphImpl, Recompute
from app.config import (
    CudaGraphConfig,
    MLAConfig,
    ModelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers.attend import Attend, TorchAttention
from tests.gpu.fp8_runs import FOUR
from tests.gpu.in_process import trained_alone
from tests.gpu.programs import GPUS, losses
from tests.runs import make_run

pytest.importorskip("transformer_engine")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not GPUS or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a GPU like Hopper: others take narrower heads, or have no fixed order",
    ),
]
SHAPES = [
    (2, 256, 256, 4, 4, 64),
    (2, 1000, 1000, 8, 2, 128),
    (1, 256, 1024, 8, 2, 128),
    (2, 192, 512, 4, 4, 64),
    (1, 512, 512, 2, 2, 192),
]


def heads_of(shape: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys, values, the output's gradient."""
    batch, queries, keys, count, kv_heads, width = shape
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (queries, count), (keys, kv_heads), (keys, kv_heads), (queries, count)
    return [
        torch.randn(batch, length, heads, width, generator=generator, device="cuda").bfloat16()
        for length, heads in sizes
    ]


def results(attend: Attend, heads: list[Tensor]) -> list[Tensor]:
    """Output, gradients of queries, keys and values."""
    *given, grad = heads
    leaves = [each.detach().requires_grad_() for each in given]
    out = attend(*leaves, window=None, documents=None, scale=None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def exact(heads: list[Tensor]) -> list[Tensor]:
    """In fp64 with a mask that is stored."""
    wide = [each.double() for each in heads]
    queries, keys = wide[0].shape[1], wide[1].shape[1]
    seen = torch.ones(queries, keys, dtype=torch.bool, device="cuda").tril(keys - queries)

    def masked(*given: Tensor, **_: Any) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in given)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    return results(masked, wide)


def off(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    return [
        float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True)
    ]


@pytest.mark.parametrize("deterministic", [True, False], ids=["ordered", "any order"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_near_to_fp64_as_the_ordered_kernel(shape: tuple[int, ...], deterministic: bool):
    heads = heads_of(shape)
    wanted = exact(heads)
    theirs = off(results(TorchAttention(True), heads), wanted)
    ours = off(results(TransformerEngineAttention(deterministic), heads), wanted)
    assert all(one < 1.5 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("shape", [*SHAPES, (2, 4096, 4096, 16, 16, 64)])
def test_gradients_in_a_fixed_order_repeat(shape: tuple[int, ...]):
    heads = heads_of(shape)
    attend = TransformerEngineAttention(True)
    first = results(attend, heads)
    for _ in range(10):
        assert all(map(torch.equal, first, results(attend, heads)))


LATENT = dataclasses.replace(
    FOUR,
    num_kv_heads=4,
    mla=MLAConfig(q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=48, qk_rope_head_dim=16,
                  v_head_dim=32),
)  # fmt: skip
RUNS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "grouped": (FOUR, {}),
    "fp16": (FOUR, {"precision": PrecisionConfig(Dtype.float16)}),
    "attention again": (FOUR, {"recompute": RecomputeConfig(phases=(Recompute.attn_core,))}),
    "layers again": (FOUR, {"recompute": RecomputeConfig(full=True)}),
    "latent": (LATENT, {}),
}


def run_of(kind: str, graph: CudaGraphConfig) -> Run:
    model, sections = RUNS[kind]
    train = TrainConfig(
        steps=20,
        seq_len=520,  # no multiple of the kernels' tiles
        micro_batch=2,
        global_batch=8,
        attention_backend=AttentionBackendKind.transformer_engine,
    )
    given = {"precision": PrecisionConfig(Dtype.bfloat16)} | sections
    return make_run(model, cuda_graph=graph, train=train, **given)


@pytest.mark.parametrize("kind", RUNS)
def test_graphs_repeat_eager_steps(kind: str):
    eager = trained_alone(run_of(kind, CudaGraphConfig()), steps=20, validates=10)
    assert eager[-1][0] < eager[0][0]
    impls = [GraphImpl.full_iteration]
    if kind == "grouped":
        impls += [GraphImpl.local, GraphImpl.transformer_engine]
    for impl in impls:
        found = trained_alone(run_of(kind, CudaGraphConfig(impl)), steps=20, validates=10)
        assert found == eager, impl


def test_auto_takes_it_and_a_resumed_run_keeps_it(tmp_path: Path):
    words = ("precision=bf16", "optim.decay_steps=8", "checkpoint=default", "parallel.dp=1")
    whole = losses(tmp_path / "whole", *words, "train.steps=8")
    settings = (tmp_path / "whole/config.yaml").read_text()
    assert "attention_backend: transformer_engine" in settings
    typed = "train.attention_backend=transformer_engine"
    assert losses(tmp_path / "typed", *words, "train.steps=8", typed) == whole
    half = tmp_path / "half"
    losses(half, *words, "train.steps=4")
    assert losses(half, *words, "train.steps=8", "resume=auto", first=5) == whole[4:]
    by_torch = tmp_path / "torch"
    losses(by_torch, *words, "train.steps=4", "train.attention_backend=torch")
    losses(by_torch, *words, "train.steps=8", "resume=auto")
    assert "attention_backend: torch" in (by_torch / "config.yaml").read_text()
