"""Kernels that quantise rows and weights of experts, against plain torch to the bit; interpreted
where there is no GPU.
"""

from __future__ import annotations

import math

import pytest
import torch

from app.kernels.eight_bits.quantise import quantise_rows, quantise_rows_into
from app.model.fp8 import row_scaled
from tests.eight_bits import (
    DEVICE,
    E4M3,
    check_columns,
    check_rows,
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
