"""Bounds of other tests: fp32 GEMMs satisfy them, and larger errors are found."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import app.engine.ranks.dtypes
import app.optim.adam
from tests.rounding import (
    EPS,
    error,
    expect_alike,
    expect_sums,
    grouped_mm,
    in_fp64,
    plain_and_exact,
)

N = 256  # terms of a GEMM


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


ENDS = torch.tensor([5, 5, 40, 64], dtype=torch.int32)
GEMMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]] = {
    "matrices": (torch.matmul, (draw(64, N), draw(N, 32))),
    "one row": (torch.matmul, (draw(1, N), draw(N, 32))),
    "batches": (torch.matmul, (draw(3, 16, N), draw(3, N, 8))),
    "linear": (F.linear, (draw(2, 32, N), draw(48, N))),
    "groups": (lambda a, b: F.grouped_mm(a, b, offs=ENDS), (draw(64, N), draw(4, N, 16))),
    "groups summed over rows": (
        lambda a, b: F.grouped_mm(a, b, offs=ENDS),
        (draw(16, 64), draw(64, 8)),
    ),
}


@pytest.mark.parametrize("name", GEMMS)
def test_gemms_keep_all_bits_of_fp32(name: str):
    """No entry is off by more than n roundings of its terms' sizes; TF32 is off by far more."""
    gemm, (a, b) = GEMMS[name]
    with in_fp64():
        exact, sizes = gemm(a.double(), b.double()), gemm(a.double().abs(), b.double().abs())
    assert ((gemm(a, b) - exact).abs() <= N * EPS / 2 * sizes).all()


def test_attention_keeps_all_bits_of_fp32():
    """GEMMs over the head width and over the keys, and one exponential."""
    q, k, v = draw(2, 4, 33, 16), draw(2, 4, 33, 16) * 2, draw(2, 4, 33, 16) * 3
    plain, exact = plain_and_exact(
        lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True), q, k, v
    )
    expect_sums(plain, exact, terms=16 + 33)


@pytest.mark.parametrize("ends", [[5, 5, 40, 64], [0, 0, 0, 0], [1, 2, 3, 50]], ids=str)
def test_groups_in_fp64_are_those_of_torch(ends: list[int]):
    offs = torch.tensor(ends, dtype=torch.int32)
    rows, weights, grad = draw(64, 16), draw(4, 16, 8), draw(64, 8)
    owned = slice(ends[-1])  # torch leaves the others uninitialised
    for ours, theirs in (
        (
            grouped_mm(rows, weights, offs=offs)[owned],
            F.grouped_mm(rows, weights, offs=offs)[owned],
        ),
        (grouped_mm(rows.T, grad, offs=offs), F.grouped_mm(rows.T, grad, offs=offs)),
    ):
        expect_sums({"gemm": ours}, {"gemm": theirs}, terms=64)


def test_another_order_of_sums_is_alike_and_fewer_bits_are_not():
    terms = draw(N, 64)
    exact, plain = {"sum": terms.double().sum(0)}, {"sum": terms.sum(0)}
    one_by_one = sum(terms.unbind())
    expect_alike({"sum": one_by_one}, plain, exact)
    for wrong in (terms.bfloat16().float().sum(0), one_by_one * (1 + 1e-4), one_by_one * math.nan):
        with pytest.raises(AssertionError, match="apart by"):
            expect_alike({"sum": wrong}, plain, exact)
        with pytest.raises(AssertionError, match="apart by"):
            expect_sums({"sum": wrong}, exact, terms=N)
    with pytest.raises(AssertionError, match="fewer bits are used"):
        expect_alike({"sum": one_by_one}, {"sum": terms.bfloat16().float().sum(0)}, exact)
    with pytest.raises(AssertionError):
        expect_alike({}, plain, exact)


def test_errors_are_parts_of_the_largest_entry():
    assert error([1.0, 4.0], [1.0, 5.0]) == 0.2
    assert error([0.0], [0.0]) == 0 and error([1.0], [0.0]) == math.inf and error([], []) == 0


def test_fp64_ends_with_its_block():
    before = (
        torch.float32,
        Tensor.float,
        F.grouped_mm,
        app.optim.adam.adamw,
        dict(app.engine.ranks.dtypes.DTYPES),
    )
    with pytest.raises(KeyError), in_fp64():
        assert torch.ones(1).float().dtype == torch.float32 == torch.float64
        raise KeyError
    after = (
        torch.float32,
        Tensor.float,
        F.grouped_mm,
        app.optim.adam.adamw,
        dict(app.engine.ranks.dtypes.DTYPES),
    )
    assert before == after and torch.ones(1).dtype == before[0] != torch.float64
