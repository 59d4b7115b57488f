"""Router scores: GEMMs of bf16 matrices against fp64, and fp32 split into bf16 parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.kernels.routing import parts
from app.kernels.routing.parts import in_parts
from app.kernels.tiling import PARTS
from app.moe.router_matmul import router_matmul
from tests.moe_kernels import DEVICE

TOKENS, WIDTH, EXPERTS = 96, 80, 12
FP32, BF16 = 2**-24, 2**-8  # largest relative error of rounding to nearest


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights, and gradients of scores over many magnitudes."""
    grad_TE = drawn(TOKENS, EXPERTS, seed=2, dtype=torch.float32)
    grad_TE *= torch.exp(2 * drawn(TOKENS, EXPERTS, seed=3, dtype=torch.float32))
    x_TD, weight_ED = drawn(TOKENS, WIDTH, seed=0), drawn(EXPERTS, WIDTH, seed=1)
    return x_TD.to(dtype).requires_grad_(), weight_ED.to(dtype).requires_grad_(), grad_TE


def off(found: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the error against the exact GEMM, relative to the sum of its terms' magnitudes."""
    left, right = left.detach().double(), right.detach().double()
    return (found.double() - left @ right).abs() / (left.abs() @ right.abs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_is_as_exact_as_fp32(dtype: torch.dtype):
    """Terms are exact; a sum of n of them is off by n roundings at most, and its gradients are
    rounded to the type of what they are of.
    """
    x_TD, weight_ED, grad_TE = given(dtype)
    scores_TE = router_matmul(x_TD, weight_ED)
    scores_TE.backward(grad_TE)
    assert scores_TE.dtype == torch.float32
    rounded = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    assert x_TD.grad is not None
    assert weight_ED.grad is not None
    assert off(scores_TE, x_TD, weight_ED.T).max() <= WIDTH * FP32
    assert off(x_TD.grad, grad_TE, weight_ED).max() <= rounded + PARTS * EXPERTS * FP32
    assert off(weight_ED.grad, grad_TE.T, x_TD).max() <= rounded + PARTS * TOKENS * FP32


def test_gradients_lose_nothing_that_bf16_would():
    """Rounded to bf16 first, gradients of weights would be several times as far off before they
    are rounded themselves.
    """
    x_TD, _, grad_TE = given(torch.bfloat16)
    parts_TP = in_parts(grad_TE)
    sums_PD = parts_TP.T.double() @ x_TD.double()
    in_all = sums_PD.view(PARTS, EXPERTS, WIDTH).sum(0)
    assert off(in_all, grad_TE.T, x_TD).max() <= FP32
    assert off(sums_PD[:EXPERTS], grad_TE.T, x_TD).max() > 2**-14


def test_parts_add_up():
    wide_TE = drawn(37, 24, seed=4, dtype=torch.float32)
    wide_TE[0] *= 1e30
    wide_TE[1] *= 1e-30
    wide_TE[2] = 0.0
    found = in_parts(wide_TE).view(37, PARTS, 24).double()
    assert torch.equal(found.sum(1).float(), wide_TE)
    assert (found[:, 1].abs() <= BF16 * found[:, 0].abs()).all()
    assert (found[:, 2].abs() <= BF16 * found[:, 1].abs()).all()


def test_the_kernel_splits_as_torch_does(monkeypatch: pytest.MonkeyPatch):
    """The interpreter cuts digits off where a GPU rounds: parts add up all the same."""
    pytest.importorskip("triton")
    wide_TE = drawn(37, 24, seed=6, dtype=torch.float32)
    wanted = in_parts(wide_TE)
    monkeypatch.setattr(parts, "usable", lambda tensor: True)
    monkeypatch.setattr(parts, "BLOCK", 128)
    found = in_parts(wide_TE)
    assert torch.equal(found.view(37, PARTS, 24).double().sum(1).float(), wide_TE)
    torch.testing.assert_close(found[:, :24], wanted[:, :24], rtol=2 * BF16, atol=0)
    if DEVICE == "cuda":
        assert torch.equal(found, wanted)


def test_parts_of_every_second_column():
    wide_TE = drawn(5, 16, seed=5, dtype=torch.float32)
    assert torch.equal(in_parts(wide_TE[:, ::2]), in_parts(wide_TE[:, ::2].contiguous()))


def test_backward_keeps_tokens_as_they_are():
    x_TD, weight_ED, _ = given(torch.bfloat16)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        router_matmul(x_TD, weight_ED)
    assert {tensor.data_ptr() for tensor in kept} == {x_TD.data_ptr(), weight_ED.data_ptr()}


def test_jitter_is_not_rounded():
    """Noise makes tokens fp32, and they are multiplied so."""
    x_TD, weight_ED, _ = given(torch.bfloat16)
    noisy_TD = x_TD.detach().float() * 1.001
    found = router_matmul(noisy_TD, weight_ED)
    assert torch.equal(found, F.linear(noisy_TD, weight_ED.float()))
