"""Runs with sliding windows on a GPU: the same bits with graphs, and near those of a CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from app.model.layers.attend import TorchAttention, visible
from tests.gpu.programs import GPUS, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
WINDOWS = (
    "train.steps=12",
    "model=dense_tiny",
    "model.sliding_window=48",
    "model.layer_types=[sliding_attention,full_attention]",
    "parallel.dp=1",
)


@pytest.mark.parametrize("graph", ["attn", "partial", "full_iteration"])
def test_a_run_with_graphs_repeats_one_without(tmp_path: Path, graph: str):
    eager = losses(tmp_path / "eager", *WINDOWS, "precision=bf16")
    assert losses(tmp_path / "again", *WINDOWS, "precision=bf16") == eager
    assert losses(tmp_path / "graphs", *WINDOWS, "precision=bf16", f"cuda_graph={graph}") == eager


def test_losses_are_those_of_a_mask(tmp_path: Path):
    """In fp32 by a mask, in bf16 by kernels that skip what a window hides."""
    masked = losses(tmp_path / "fp32", *WINDOWS, "precision=fp32")
    ways = {"bf16": (("precision=bf16",), 3e-2)}
    if find_spec("transformer_engine") is not None:
        library = "train.attention_backend=transformer_engine"
        ways["library"] = (("precision=bf16", library), 3e-2)
    for name, (words, bound) in ways.items():
        found = losses(tmp_path / name, *WINDOWS, *words)
        for (loss, _), (wanted, _) in zip(found, masked, strict=True):
            assert loss == pytest.approx(wanted, rel=bound)


@pytest.mark.parametrize("queries", [200, 320], ids=["last of the keys", "all"])
@pytest.mark.parametrize("window", [1, 64, 100])
def test_kernels_hide_what_a_window_hides(queries: int, window: int):
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, length, heads, 64, device="cuda", generator=generator)
        for length, heads in ((queries, 4), (320, 2), (320, 2), (queries, 4))
    )

    def gradients(dtype: torch.dtype, by_mask: bool) -> list[torch.Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in (q, k, v)]
        if by_mask:
            seen = visible(2, queries, 320, q.device, window, None)
            heads = (each.transpose(1, 2) for each in leaves)
            out = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=seen, enable_gqa=True
            ).transpose(1, 2)
        else:
            out = TorchAttention()(*leaves, window=window, documents=None, scale=None)
        return [out, *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact = gradients(torch.float64, by_mask=True)
    for found, wanted in zip(gradients(torch.bfloat16, by_mask=False), exact, strict=True):
        # of one visible key, the gradient of the query is 0
        assert (found.double() - wanted).norm() < 1e-2 * wanted.norm() + 1e-5 * grad.norm()
