"""Gradients of norms, summed by parts of the rows: against fp64, and by every way to their sums.

Runs on a GPU where there is one, and interpreted otherwise.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from app.kernels import partial_sums
from app.kernels.partial_sums import add_summed, summed
from app.model.layers import layers
from app.model.layers.layers import RMSNorm
from app.model.layers.recompute import Recomputation
from app.model.layers.weight_grads import (
    MainGradSink,
    PartialSums,
    WeightGrad,
    WeightGradQueue,
    WeightGradSink,
)
from app.plan.model.norm import NormWeights
from tests.tensors.kernels_layer import EPS, close, normal

pytest.importorskip("triton")
WIDTH = 40
# without parts, with fewer than a program takes at a time, and with more; whole and cut columns
SHAPES = [(0, 8), (1, 14), (5, 1100), (256, 16), (600, 40)]
Forward = Callable[[RMSNorm, Tensor, WeightGradSink | None], Tensor]


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_of_parts(shape: tuple[int, int], dtype: torch.dtype):
    parts = normal(*shape, dtype=torch.float32)
    exact = parts.double().sum(0)
    found = summed(parts, dtype)
    assert found.dtype is dtype and torch.equal(found, summed(parts, dtype))
    close(found, exact)
    before = normal(shape[1], dtype=dtype, seed=1)
    total, again = before.clone(), before.clone()
    add_summed(total, parts)
    add_summed(again, parts)
    assert torch.equal(total, again)
    close(total, exact + before.double())


def test_sums_of_more_bits_are_added_to_unrounded():
    """Unlike autograd, whose addends are rounded to the dtype of the weight."""
    gradient = PartialSums(normal(600, WIDTH, dtype=torch.float32), torch.bfloat16)
    total, written = (normal(WIDTH, dtype=torch.float32, seed=1) for _ in range(2))
    exact = gradient.partial_JW.double().sum(0)
    rounded = gradient()
    assert rounded.dtype is torch.bfloat16
    close(rounded, exact)
    before = total.clone()
    gradient.add_to(total)
    close(total, before.double() + exact)
    assert not torch.equal(total, before + rounded)
    gradient.write_to(written)
    close(written, exact)


def alone(norm: RMSNorm, x: Tensor, sink: WeightGradSink | None) -> Tensor:
    return norm.forward(x, sink)


def beside(norm: RMSNorm, x: Tensor, sink: WeightGradSink | None) -> Tensor:
    same, out = norm.beside(x, Recomputation(), sink)
    return same + out


@pytest.mark.parametrize("forward", [alone, beside])
def test_every_way_of_a_norms_gradient(forward: Forward, monkeypatch: pytest.MonkeyPatch):
    """At once to the sum, also from a split backward, whose queue holds nothing of it; or to
    autograd where there is no sum of more bits.
    """
    monkeypatch.setattr(layers, "usable", lambda *tensors: True)
    monkeypatch.setattr(partial_sums, "ROWS", 4)  # several at a time
    norm = RMSNorm(NormWeights.of(WIDTH), EPS)
    norm.weight = nn.Parameter(normal(WIDTH, dtype=torch.bfloat16, seed=1))
    given, grad = (normal(3, 11, WIDTH, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    total = normal(WIDTH, dtype=torch.float32, seed=4)

    def add(param: nn.Parameter, gradient: WeightGrad) -> None:
        assert param is norm.weight
        gradient.add_to(sums)

    def gradients(sink: WeightGradSink | None) -> tuple[Tensor, Tensor]:
        norm.weight.grad = None
        x = given.clone().requires_grad_()
        forward(norm, x, sink).backward(grad)
        return x.grad, norm.weight.grad

    main = MainGradSink(add)
    for first, then in ((None, main), (WeightGradQueue(), WeightGradQueue(main))):
        sums = total.clone()
        by_autograd = gradients(first)
        assert torch.equal(sums, total)
        by_sink = gradients(then)
        assert torch.equal(by_autograd[0], by_sink[0]) and by_sink[1] is None
        close(by_autograd[1], (sums - total).double())
        assert not isinstance(then, WeightGradQueue) or then.waiting == []
        exact = given.double() * torch.rsqrt(given.double().square().mean(-1, keepdim=True) + EPS)
        close(sums, total.double() + (grad.double() * exact).sum((0, 1)))
