"""Kernels that quantise rows and weights of experts, against plain torch to the bit; interpreted
where there is no GPU.
"""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from app.choices import Recompute
from app.kernels.eight_bits.quantise import quantise_rows, quantise_rows_into
from app.model import layers
from app.model.fp8 import row_scaled
from app.model.fp8.experts import Fp8GroupedLinear
from app.model.fp8.quantised import Quantised
from app.model.fp8.row_scaled import RowScaled, by_reference
from app.model.recompute import Recomputation
from app.moe.experts import Experts
from app.plan.model.experts import ExpertWeights
from app.plan.recompute import RecomputeChoice
from tests.eight_bits import (
    DEVICE,
    E4M3,
    check_columns,
    check_rows,
    check_swiglu,
    entries,
    rounds_to_nearest,
    same,
)

pytest.importorskip("triton")
nearest = pytest.fixture(autouse=True)(rounds_to_nearest)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 16), (3, 2064), (40, 48)])
def test_rows_have_a_scale_each(shape: tuple[int, int], dtype: torch.dtype):
    check_rows(*shape, dtype=dtype)


@pytest.mark.parametrize("used", [0, 1, 37, 64, 80])
def test_rows_of_nobody_are_neither_read_nor_written(used: int, monkeypatch: pytest.MonkeyPatch):
    """80 rows are those that the memory is for; with one program they are gone through in turn."""
    monkeypatch.setattr("app.kernels.eight_bits.quantise.PROGRAMS", 1)
    monkeypatch.setattr("app.kernels.eight_bits.quantise.MULTIPROCESSORS", 2)
    x = entries(80, 144, dtype=torch.bfloat16)
    wanted = row_scaled._rows_of(x[:used])
    x[used:] = math.nan
    found = (
        torch.full((80, 144), 0.5, device=DEVICE).to(E4M3),
        torch.full((80,), 0.5, device=DEVICE),
    )
    quantise_rows_into(x, *found, torch.tensor([used], dtype=torch.int32, device=DEVICE))
    for one, other in zip(found, wanted, strict=True):
        assert same(one[:used], other) and one[used:].float().eq(0.5).all()


@DTYPES
@pytest.mark.parametrize("shape", [(2, 16, 48), (3, 272, 80), (1, 130, 64)])
def test_columns_of_weights_become_rows(shape: tuple[int, int, int], dtype: torch.dtype):
    check_columns(*shape, dtype=dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_what_has_no_scale():
    """Infinity becomes the largest number, NaN stays; either shares its row with nobody."""
    x = torch.ones(5, 32, device=DEVICE)
    x[0, 3], x[1, 3], x[2, 3], x[3] = math.inf, math.nan, 1e-45, 1e-45
    data, scales = quantise_rows(x)
    assert data[0].float()[3] == 448 and data[1].float()[3].isnan() and data[2].float()[3] == 0
    assert scales[0] == 1 and scales[4] == 1 / 448 and data[4].float().eq(448).all()
    assert data[3].float().eq(448 if DEVICE == "cuda" else data[3].float()[0]).all()
    assert scales.isfinite().all()


@DTYPES
@pytest.mark.parametrize(("rows", "width", "used"), [(5, 16, 5), (12, 528, 7), (40, 48, 0)])
def test_swiglu_leaves_its_rows_in_eight_bits(
    rows: int, width: int, used: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.kernels.eight_bits.swiglu.MULTIPROCESSORS", 1)
    monkeypatch.setattr("app.kernels.eight_bits.swiglu.PROGRAMS", 2)
    check_swiglu(rows, width, used, dtype)


WEIGHTS = ExpertWeights.of(48, 32, 3)
ENDS = torch.tensor([7, 7, 17], dtype=torch.int32, device=DEVICE)


def trained(fused: bool, part: Recompute | None) -> tuple[list[Tensor], dict[str, int]]:
    """Output and gradients of experts in eight bits, and how often rows were quantised on their
    own.
    """
    quantised: Counter[str] = Counter()
    arithmetic = RowScaled(by_reference)
    rows_of = arithmetic.rows

    def counted(x: Tensor, ends: Tensor) -> Quantised:
        quantised["by themselves"] += 1
        return rows_of(x, ends)

    arithmetic.rows = counted  # type: ignore[method-assign]
    experts = Experts(WEIGHTS).to(DEVICE, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    for grouped in (experts.w_up, experts.w_down):
        shape = grouped.weight.shape
        grouped.weight.data = (torch.randn(shape, generator=generator) * 0.1).to(grouped.weight)
        backend = Fp8GroupedLinear(arithmetic, grouped.weight)
        if not fused:
            backend.ready_rows = None  # type: ignore[assignment]
        grouped.backend = backend
    rows = entries(20, 48, dtype=torch.bfloat16).requires_grad_()
    chosen = RecomputeChoice(parts=frozenset() if part is None else frozenset((part,)))
    recompute = Recomputation(chosen)
    with recompute.forward():
        out = experts(rows, ENDS, recompute=recompute)
    grad = entries(20, 48, dtype=torch.bfloat16).flip(0)
    weights = [experts.w_up.weight, experts.w_down.weight]
    found = torch.autograd.grad(out, [rows, *weights], grad)
    used = int(ENDS[-1])
    return [out[:used].detach(), found[0][:used], *found[1:]], dict(quantised)


@pytest.mark.parametrize("part", [None, Recompute.experts_act])
def test_rows_that_are_ready_are_those_that_products_would_quantise(
    part: Recompute | None, monkeypatch: pytest.MonkeyPatch
):
    for module in (layers, row_scaled):
        monkeypatch.setattr(module, "usable", lambda *_: True)
    if DEVICE == "cpu":  # whose product has no memory of its own to describe
        monkeypatch.setattr(row_scaled, "usable", lambda x: x.dtype == torch.bfloat16)
    apart, of_own = trained(False, part)
    ready, left = trained(True, part)
    assert all(same(one, other) for one, other in zip(ready, apart, strict=True))
    assert of_own == {"by themselves": 4} and left == {"by themselves": 2}
