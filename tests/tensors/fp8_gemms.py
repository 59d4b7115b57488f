"""Shared by test_fp8_gemms.py and other tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.fp8.quantised import Fp8Arithmetic
from app.fp8.reference import BLOCK, E4M3, E5M2

HALF_STEP = {E4M3: 2**-4, E5M2: 2**-3}  # of an entry, of 3 and 2 digits behind the first


LAST = {E4M3: 2**-10, E5M2: 2**-17}  # half of the smallest number, in units of the scale


def largest_of(x: Tensor, recipe: str, by_columns: bool, weight: bool) -> Tensor:
    """The largest of the entries that share a scale with each."""
    if recipe == "current":
        return x.abs().amax().expand_as(x)
    window = (BLOCK, BLOCK) if weight else (BLOCK, 1) if by_columns else (1, BLOCK)
    pooled = F.max_pool2d(x.abs()[None], window, ceil_mode=True)[0]
    each = pooled.repeat_interleave(window[0], 0).repeat_interleave(window[1], 1)
    return each[: x.shape[0], : x.shape[1]]


def off_by(x: Tensor, dtype: torch.dtype, largest: Tensor) -> Tensor:
    """Return the rounding error an FP8 entry may have; a scale may be half of the largest that
    fits.
    """
    return x.abs() * HALF_STEP[dtype] + 2 * largest / torch.finfo(dtype).max * LAST[dtype]


def check_gemms(
    arithmetic: Fp8Arithmetic,
    recipe: str,
    x: Tensor,
    weight: Tensor,
    grad: Tensor,
    *,
    sums: float = torch.finfo(torch.float32).eps,
) -> None:
    """Compare the three GEMMs, in fp32, with fp64; `sums`: rounding error of adding two numbers,
    relative to the largest partial sum.
    """
    back = E4M3 if recipe == "block" else E5M2
    in_8 = arithmetic.input(x), arithmetic.weight(weight), arithmetic.grad(grad)
    rows = len(x)
    found = {
        "output": arithmetic.output(in_8[0], in_8[1], torch.float32)[:rows],
        "input": arithmetic.input_grad(in_8[2], in_8[1], torch.float32)[:rows],
        "weight": arithmetic.weight_grad(in_8[2], in_8[0].for_weight_grad(), torch.float32),
    }
    total = torch.ones_like(found["weight"])
    arithmetic.add_weight_grad(in_8[2], in_8[0], total)
    largest = found["weight"].abs().max().item() + 1
    assert (total - 1 - found["weight"]).abs().max().item() <= largest * 2**-20

    def pair(by_columns: bool, *given: tuple[Tensor, torch.dtype, bool]) -> list[Tensor]:
        wide = []
        for value, dtype, is_weight in given:
            exact = value.double()
            largest = largest_of(value.float(), recipe, by_columns, is_weight).double()
            wide += [exact, off_by(exact, dtype, largest)]
        return wide

    given = {
        "output": (pair(False, (x, E4M3, False), (weight, E4M3, True)), "ti,oi->to"),
        "input": (pair(False, (grad, back, False), (weight, E4M3, True)), "to,oi->ti"),
        "weight": (pair(True, (grad, back, False), (x, E4M3, False)), "to,ti->oi"),
    }
    for name, ((left, left_off, right, right_off), how) in given.items():
        exact = torch.einsum(how, left, right)
        most = torch.einsum(how, left.abs() + left_off, right.abs() + right_off)
        bound = most - torch.einsum(how, left.abs(), right.abs())
        error = (found[name].double() - exact).abs()
        rounding = most * left.numel() / len(exact) * sums
        assert (error <= bound + rounding).all(), name
        assert error.max() > 0, f"{name} is not in FP8"
