"""FP8 matrices on the CPU: scales, rounding, and the three GEMMs against fp64.

Bounds are those of the format: an FP8 entry is off by half a step, which is a share of itself, or
where the dtype runs out of exponents a share of its scale.

Shapes: T rows, IN and OUT widths.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.fp8.quantised import Quantised
from app.fp8.reference import BLOCK, E4M3, E5M2, BlockScaled, Reference, TensorScaled
from app.fp8.reference import scale_for as scale_of
from tests.tensors.fp8_gemms import check_gemms

T, IN, OUT = 200, 272, 144  # no multiples of 128
RECIPES = {"current": TensorScaled(), "block": BlockScaled()}


def normal(*shape: int, seed: int = 0) -> Tensor:
    """With entries of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_gemms_are_as_near_to_fp64_as_fp8_allows(recipe: str):
    x, weight, grad = normal(T, IN), normal(OUT, IN, seed=1), normal(T, OUT, seed=2) * 1e-6
    check_gemms(RECIPES[recipe], recipe, x, weight, grad)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_fp8_hold_is_exact(recipe: str):
    arithmetic: Reference = RECIPES[recipe]
    generator = torch.Generator().manual_seed(0)
    whole = lambda *shape: torch.randint(-8, 9, shape, generator=generator).float()  # noqa: E731
    x, weight, grad = whole(T, IN), whole(OUT, IN), whole(T, OUT)
    grad = grad.sign() * 2.0 ** (grad.abs() - 4)  # of one digit
    for each in (x, weight, grad):
        each[0, 0] = each[-1, -1] = 7.0  # 448 is 7 · 64: scales are powers of two
        each.clamp_(-7, 7)
    in_8 = arithmetic.input(x), arithmetic.weight(weight), arithmetic.grad(grad)
    if recipe == "current":  # E5M2 ends with 7 · 2¹³
        assert in_8[2].row_scales is not None and in_8[2].row_scales.item() == 2.0**-13
    exact = x.double(), weight.double(), grad.double()
    assert torch.equal(
        arithmetic.output(in_8[0], in_8[1], torch.float32).double(), exact[0] @ exact[1].T
    )
    assert torch.equal(
        arithmetic.input_grad(in_8[2], in_8[1], torch.float32).double(), exact[2] @ exact[1]
    )
    assert torch.equal(
        arithmetic.weight_grad(in_8[2], in_8[0], torch.float32).double(), exact[2].T @ exact[0]
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_make_the_largest_entry_the_largest_number(dtype: torch.dtype):
    most = torch.finfo(dtype).max
    for largest in (1e-30, 3e-5, 1.0, 447.0, 6e4, 1e30):
        scale = scale_of(torch.tensor(largest), dtype).item()
        assert math.isclose(scale * largest, most, rel_tol=1e-6)
        power = scale_of(torch.tensor(largest), dtype, power_of_two=True).item()
        assert math.frexp(power)[0] == 0.5 and power <= scale < 2 * power
    for unusable in (0.0, math.inf, math.nan):
        assert scale_of(torch.tensor(unusable), dtype).item() == 1.0
    assert scale_of(torch.tensor(1e-45), dtype).item() == torch.finfo(torch.float32).max


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_stays_visible(recipe: str):
    """A NaN goes through every GEMM, and does not affect the scales of other matrices."""
    arithmetic: Reference = RECIPES[recipe]
    x, weight = normal(16, IN), arithmetic.weight(normal(OUT, IN, seed=1))
    x[3, 5] = math.nan
    out = arithmetic.output(arithmetic.input(x), weight, torch.float32)
    assert out[3].isnan().all() and out[4].isfinite().all()


def test_blocks_keep_an_outlier_to_themselves():
    """Beside an entry of 10⁶, current scaling loses what is below 10⁶ / 448 / 2⁹."""
    x = torch.ones(256, 256)
    x[0, 0] = 1e6
    current, block = (recipe.input(x) for recipe in RECIPES.values())
    assert TensorScaled().rows(current)[1:].eq(0).all()
    rows, columns = BlockScaled().rows(block), BlockScaled().columns(block)
    assert rows[0, 1:BLOCK].eq(0).all() and rows[0, BLOCK:].eq(1).all() and rows[1:].eq(1).all()
    assert columns[1:BLOCK, 0].eq(0).all() and columns[:, 1:].eq(1).all()
    weight = BlockScaled().weight(x)
    wide = BlockScaled().weights(weight)
    assert wide[:BLOCK, :BLOCK].sum() == wide[0, 0] and wide[BLOCK:].eq(1).all()
    assert wide[:, BLOCK:].eq(1).all()


def test_a_kept_input_takes_a_byte_per_element():
    x = normal(256, 512)
    for name, recipe in RECIPES.items():
        kept = recipe.input(x).for_weight_grad()
        held = [each for each in kept.tensors() if each is not None]
        scales = 1 if name == "current" else x.numel() // BLOCK
        assert sum(each.nbytes for each in held) == x.numel() + 4 * scales
        assert isinstance(kept, Quantised) and kept.lead == (256,)
