"""Attention with a learnt sink per query head, beside a softmax over one key more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.model.attention.sinks import TorchSinks, look_with_sinks
from app.model.layers.attend import DocumentOffsets, visible

SEQUENCES, QUERIES, KEYS, HEADS, KV_HEADS, WIDTH = 2, 7, 12, 4, 2, 8
ENDS = torch.tensor([[5, 12], [9, 12]], dtype=torch.int32)


def drawn() -> list[Tensor]:
    """Queries, keys, values and sinks."""
    shapes = ((QUERIES, HEADS, WIDTH), (KEYS, KV_HEADS, WIDTH), (KEYS, KV_HEADS, WIDTH))
    generator = torch.Generator().manual_seed(1)
    wide = {"generator": generator, "dtype": torch.float64, "requires_grad": True}
    heads = [torch.randn(SEQUENCES, *shape, **wide) for shape in shapes]
    return [*heads, torch.randn(HEADS, **wide)]


def softmax(leaves: list[Tensor], seen: Tensor, scale: float) -> Tensor:
    """The same by a softmax over the keys and the sink."""
    q, k, v, sinks = leaves
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, dim=2) for each in (k, v))
    scores = torch.einsum("bsnh,bknh->bnsk", q, k) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    probs = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bnsk,bknh->bsnh", probs, v)


@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_sinks_equal_softmax_over_one_more_key(
    window: int | None, masked: bool, scale: float | None
):
    leaves = drawn()
    documents = DocumentOffsets.of(ENDS, QUERIES, KEYS) if masked else None
    attend = TorchSinks(leaves[3], deterministic=True)
    out = attend(*leaves[:3], window=window, documents=documents, scale=scale)
    seen = visible(SEQUENCES, QUERIES, KEYS, out.device, window, documents)
    expected = softmax(leaves, seen, scale or WIDTH**-0.5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    grad = torch.randn(out.shape, dtype=out.dtype)
    found, wanted = (torch.autograd.grad(each, leaves, grad) for each in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@torch.no_grad()
def test_one_token_looks_with_sinks():
    q, k, v, sinks = (each.float() for each in drawn())
    groups = q[:, -1:].transpose(1, 2).reshape(SEQUENCES, KV_HEADS, -1, WIDTH)
    bias = torch.zeros(SEQUENCES, 1, 1, KEYS)
    bias[:, :, :, 9:] = -torch.inf
    kv = (each.transpose(1, 2) for each in (k, v))
    found = look_with_sinks(groups, *kv, bias=bias, sinks_N=sinks, scale=0.3)
    expected = softmax([q[:, -1:], k, v, sinks], bias == 0, 0.3)
    torch.testing.assert_close(found.reshape(expected.shape), expected)
