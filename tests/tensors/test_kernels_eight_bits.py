"""Kernels that quantise rows and weights of experts, against plain torch to the bit; interpreted
where there is no GPU.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from app.kernels.eight_bits.quantise import (
    quantise_columns_into,
    quantise_rows,
    quantise_rows_into,
)
from app.model.fp8 import row_scaled
from tests.eight_bits import DEVICE, E4M3, rounds_to_nearest, same

pytest.importorskip("triton")
nearest = pytest.fixture(autouse=True)(rounds_to_nearest)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def entries(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, and a row of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 8
    x[..., 1, :] = 0
    return x.to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 16), (3, 2064), (40, 48)])
def test_rows_have_a_scale_each(shape: tuple[int, int], dtype: torch.dtype):
    x = entries(*shape, dtype=dtype)
    found, wanted = quantise_rows(x), row_scaled._rows_of(x)
    assert all(same(one, other) for one, other in zip(found, wanted, strict=True))


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
    weight = entries(*shape, dtype=dtype)
    weight[..., 3] = 0
    experts, width, made = shape
    data = torch.empty(experts, made, width, dtype=E4M3, device=DEVICE)
    scales = torch.empty(experts, made, device=DEVICE)
    quantise_columns_into(weight, data, scales)
    wanted = row_scaled._rows_of(weight.mT)
    assert same(data, wanted[0]) and same(scales, wanted[1])


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
