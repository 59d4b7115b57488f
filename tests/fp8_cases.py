"""Rows and weights of experts in FP8 at any size, on any device: kernels against plain torch
to the bit, GEMMs beside fp64. And Triton's interpreter, which has to round.

Shapes: E experts, T rows, K the width that a GEMM sums over, N the one that it makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from app.fp8 import row_scaled
from app.kernels import rows as rows_kernels
from app.kernels.fp8.swiglu import swiglu_rows, swiglu_rows_gradient
from app.kernels.fp8.weights import quantise_weight_into
from app.kernels.quantise import quantise_rows
from app.kernels.swiglu import swiglu
from tests.forks import Patches

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
HALF_STEP, LAST = 2**-4, 2**-10  # of an entry; half of the smallest number, in units of the scale
FP32 = torch.finfo(torch.float32).eps


def rounds_to_nearest() -> Iterator[None]:
    """The interpreter loses the carry of a number rounded to FP8 (1.95 becomes 1) and has no
    largest one, and cuts digits of bf16 off; a GPU does none of it. Both get torch's rounding, and
    FP8 the largest number for what is beyond. For a fixture.
    """
    with Patches.context() as patch:
        if DEVICE == "cpu":
            interpreter = pytest.importorskip("triton.runtime.interpreter")
            usual = interpreter._convert_float
            narrow = {
                interpreter.tl.float8e4nv: (E4M3, torch.uint8),
                interpreter.tl.bfloat16: (torch.bfloat16, torch.uint16),
            }

            def convert(given: Any, given_type: Any, wanted_type: Any, rounding: Any) -> Any:
                if given_type != interpreter.tl.float32 or wanted_type not in narrow:
                    return usual(given, given_type, wanted_type, rounding)
                dtype, bits = narrow[wanted_type]
                wide = torch.from_numpy(np.ascontiguousarray(given).view(np.float32))
                if dtype == E4M3:
                    wide = wide.clamp(-448, 448)
                return wide.to(dtype).view(bits).numpy().reshape(given.shape)

            patch.setattr(interpreter, "_convert_float", convert)
        yield


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal numbers, NaN where there is NaN."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    return torch.equal(*(each.float().nan_to_num(nan=1e30) for each in (found, wanted)))


def entries(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return entries of very different sizes, with a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 8
    x[..., 1, :] = 0
    return x.to(DEVICE, dtype)


def check_rows(*shape: int, dtype: torch.dtype) -> None:
    """Entries and scales are those of plain torch."""
    x = entries(*shape, dtype=dtype)
    found, wanted = quantise_rows(x), row_scaled._rows_of(x)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


def check_swiglu(rows: int, width: int, used: int, dtype: torch.dtype) -> None:
    """Forward and backward make what the kernels of one step each make, to the bit; rows of nobody
    are NaN, and change nothing.
    """
    both, grad = entries(rows, 2 * width, dtype=dtype), entries(rows, width, dtype=dtype).flip(0)
    both[used:] = grad[used:] = math.nan
    count = torch.tensor([used], dtype=torch.int32, device=DEVICE)
    leaf = both.clone().requires_grad_()
    act = swiglu(leaf, count)
    (grad_both,) = torch.autograd.grad(act, leaf, grad)
    for found, wanted in (
        (swiglu_rows(both, count), act.detach()),
        (swiglu_rows_gradient(grad, both, count), grad_both),
    ):
        fp8_rows = row_scaled._rows_of(wanted[:used])
        for one, other in zip(found, (wanted[:used], *fp8_rows), strict=True):
            assert same(one[:used], other)


def check_spread(tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    """Check that kernels that permute tokens and gradients write bit-exact FP8 copies.

    With peer access some rows belong to no choice, and neither copy of them is written.
    """
    count = tokens * top_k
    x, grad = entries(tokens, width, dtype=dtype), entries(tokens, width, dtype=dtype).flip(0)
    rows, probs = entries(count, width, dtype=dtype), torch.rand(tokens, top_k, device=DEVICE)
    row_of = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    row_of = row_of.view(tokens, top_k).to(DEVICE)
    some = row_of.int().masked_fill(row_of % 5 == 0, count)

    def empty() -> tuple[Tensor, Tensor]:
        return torch.zeros(count, width, device=DEVICE).to(E4M3), torch.zeros(count, device=DEVICE)

    makers: list[tuple[bool, Callable[[tuple[Tensor, Tensor]], Tensor]]] = [
        (True, lambda fp8_rows: rows_kernels.spread_rows(x, row_of, count, fp8_rows=fp8_rows)),
        (
            True,
            lambda fp8_rows: rows_kernels.combine_gradients(
                grad, rows, probs, row_of, fp8_rows=fp8_rows
            )[0],
        ),
        (
            False,
            lambda fp8_rows: rows_kernels.spread_rows(x, some, count, fp8_rows=fp8_rows),
        ),
        (
            False,
            lambda fp8_rows: rows_kernels.combine_gradients(
                grad, rows, probs, some, fp8_rows=fp8_rows
            )[0],
        ),
    ]
    for whole, make in makers:
        fp8_rows = empty()
        made = make(fp8_rows)
        own = torch.arange(count, device=DEVICE) % 5 > (-1 if whole else 0)
        for found, wanted in zip(fp8_rows, row_scaled._rows_of(made[own]), strict=True):
            assert same(found[own], wanted)
            assert not found[~own].float().any()


def check_weight(*shape: int, dtype: torch.dtype) -> None:
    """Both copies are those of plain torch, one of the matrices turned around."""
    weight = entries(*shape, dtype=dtype)
    weight[..., 3] = 0
    experts, width, made = shape

    def empty(*copy: int) -> tuple[Tensor, Tensor]:
        return (
            torch.empty(copy, dtype=E4M3, device=DEVICE),
            torch.empty(copy[:2], device=DEVICE),
        )

    by_rows, by_columns = empty(*shape), empty(experts, made, width)
    quantise_weight_into(weight, by_rows, by_columns)
    for found, given in ((by_rows, weight), (by_columns, weight.mT)):
        wanted = row_scaled._rows_of(given)
        assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


def off_by(x: Tensor) -> Tensor:
    """Return the error that an entry may have if its row has one scale."""
    return x.abs() * HALF_STEP + x.abs().amax(-1, keepdim=True) / 448 * LAST


def expect_within(
    found_TN: Tensor,
    rows_TK: Tensor,
    matrix_ENK: Tensor,
    ends_E: Tensor,
    *,
    sums: float = FP32,
    rounding: float = 0.0,
) -> None:
    """rows[e] · matrix[e]ᵀ as near to fp64 as FP8 are; `sums`: what adding two numbers may
    be off, in parts of the largest partial sum; `rounding`: of the result.
    """
    begin = 0
    for matrix_NK, end in zip(matrix_ENK.double(), ends_E.tolist(), strict=True):
        rows = rows_TK[begin:end].double()
        exact = rows @ matrix_NK.T
        most = (rows.abs() + off_by(rows)) @ (matrix_NK.abs() + off_by(matrix_NK)).T
        bound = most - rows.abs() @ matrix_NK.T.abs()
        error = (found_TN[begin:end].double() - exact).abs()
        assert (error <= bound + most * (rows.shape[1] * sums + rounding)).all()
        assert not len(error) or error.max() > 0, "not in FP8"
        begin = end
