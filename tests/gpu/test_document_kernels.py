"""Packed documents on a GPU: kernels beside fp64, the same bits again and with graphs, and losses
near those of a CPU.

Shapes: B sequences, S queries, K keys, N query heads, G key/value heads, H head width.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.choices import AttentionBackendKind, Dtype, GraphImpl, Recompute
from app.config import (
    CudaGraphConfig,
    DataConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.model.attention.transformer_engine import TransformerEngineAttention
from app.model.layers.attend import Attend, DocumentOffsets, TorchAttention, visible
from tests.gpu.fp8_runs import FOUR
from tests.gpu.in_process import trained_alone
from tests.gpu.programs import GPUS, losses
from tests.runs import make_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
BACKENDS = [
    AttentionBackendKind.torch,
    pytest.param(
        AttentionBackendKind.transformer_engine,
        marks=pytest.mark.skipif(find_spec("transformer_engine") is None, reason="not installed"),
    ),
]
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda each: each.value)
# queries and keys, of sequences of 320 tokens: all, and those of two chunks of a sequence
SHAPES = [(320, 320), (80, 160), (80, 320)]
ENDS = ((3, 64, 65, 200, 320, 320), (100, 130, 320, 320, 320, 320))


def attend_of(backend: AttentionBackendKind, ordered: bool) -> Attend:
    if backend is AttentionBackendKind.torch:
        return TorchAttention(ordered)
    return TransformerEngineAttention(ordered)


def drawn(queries: int, keys: int) -> tuple[list[Tensor], DocumentOffsets]:
    """Queries, keys, values, the output's gradient; and the documents of two sequences."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (queries, 8), (keys, 2), (keys, 2), (queries, 8)
    heads = [
        torch.randn(2, length, count, 64, generator=generator, device="cuda").bfloat16()
        for length, count in sizes
    ]
    ends = torch.tensor(ENDS, dtype=torch.int32, device="cuda")
    return heads, DocumentOffsets.of(ends, queries, keys)


def results(
    attend: Attend, heads: list[Tensor], window: int | None, documents: DocumentOffsets
) -> list[Tensor]:
    """Output, gradients of queries, keys and values."""
    *given, grad = heads
    leaves = [each.detach().requires_grad_() for each in given]
    out = attend(*leaves, window=window, documents=documents, scale=None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def exact(heads: list[Tensor], window: int | None, documents: DocumentOffsets) -> list[Tensor]:
    """In fp64 with a mask that is stored."""
    q, k, v, grad = (each.double() for each in heads)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    seen = visible(len(q), q.shape[1], k.shape[1], q.device, window, documents)
    turned = (each.transpose(1, 2) for each in leaves)
    out = F.scaled_dot_product_attention(*turned, attn_mask=seen, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@each_backend
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_kernels_hide_other_documents(
    backend: AttentionBackendKind, queries: int, keys: int, window: int | None
):
    heads, documents = drawn(queries, keys)
    found = results(attend_of(backend, ordered=False), heads, window, documents)
    for each, wanted in zip(found, exact(heads, window, documents), strict=True):
        assert (each.double() - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
def test_ordered_gradients_repeat(queries: int, keys: int, window: int | None):
    heads, documents = drawn(queries, keys)
    first = results(TorchAttention(True), heads, window, documents)
    for _ in range(10):
        again = results(TorchAttention(True), heads, window, documents)
        assert all(map(torch.equal, first, again))


def run_of(backend: AttentionBackendKind, graph: CudaGraphConfig, again: bool) -> Run:
    train = TrainConfig(
        steps=12,
        seq_len=512,
        micro_batch=2,
        global_batch=8,
        attention_backend=backend,
        deterministic=backend is AttentionBackendKind.torch,
    )
    return make_run(
        FOUR,
        cuda_graph=graph,
        train=train,
        precision=PrecisionConfig(Dtype.bfloat16),
        data=DataConfig(document_mask=True, max_documents=200),
        recompute=RecomputeConfig(phases=(Recompute.attn_core,)) if again else RecomputeConfig(),
    )


@pytest.mark.parametrize("again", [False, True], ids=["saved", "attention again"])
def test_graphs_repeat_eager_steps(again: bool):
    backend = AttentionBackendKind.torch
    eager = trained_alone(run_of(backend, CudaGraphConfig(), again), steps=12, validates=6)
    for impl in (GraphImpl.full_iteration, GraphImpl.local):
        run = run_of(backend, CudaGraphConfig(impl), again)
        assert trained_alone(run, steps=12, validates=6) == eager, impl


@each_backend
def test_graphs_train_on_new_documents(backend: AttentionBackendKind):
    """Nor does a graph keep the documents of the step in which it was captured."""
    eager = trained_alone(run_of(backend, CudaGraphConfig(), False), steps=12)
    graphs = CudaGraphConfig(GraphImpl.full_iteration)
    found = trained_alone(run_of(backend, graphs, False), steps=12)
    for one, other in zip(found, eager, strict=True):
        assert one[0] == pytest.approx(other[0], rel=2e-3)


@each_backend
def test_losses_are_those_of_a_mask(tmp_path: Path, backend: AttentionBackendKind):
    """Of documents as short as functions: fp32 by a mask, bf16 by kernels."""
    typed = ("train.steps=12", "model=dense_tiny", "parallel.dp=1", "data.document_mask=true")
    masked = losses(tmp_path / "masked", *typed, "precision=fp32")
    order = str(backend is AttentionBackendKind.torch).lower()
    kernels = f"train.attention_backend={backend.value}", f"train.deterministic={order}"
    found = losses(tmp_path / "gpu", *typed, "precision=bf16", *kernels)
    for (loss, _), (wanted, _) in zip(found, masked, strict=True):
        assert loss == pytest.approx(wanted, rel=3e-2)
