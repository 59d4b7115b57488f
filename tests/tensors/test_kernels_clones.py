"""Kernels of clones at small, odd sizes, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from app.kernels.grouped_gemm import grouped_gemm
from tests.cases import chosen
from tests.clone_kernels import (
    check_add_clones,
    check_grouped_gemm,
    check_push_clones,
    draw_clones,
)
from tests.moe_kernels import DEVICE

pytest.importorskip("triton")
# rows of each group, and the first group with a matrix
ROWS = [([5, 0, 130, 3], 1), ([0, 260, 7], 0), ([9, 4], 1), ([0, 0, 128], 2), ([6, 0], 1)]
# ranks, slots of each, experts of each, matrix
SIZES = [(2, 2, 1, (5, 7)), (3, 1, 2, (8, 16)), (1, 1, 1, (3, 1)), (2, 3, 2, (4, 8))]


@pytest.mark.cover(1)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("width", "columns"), [(40, 136), (136, 8)])
@pytest.mark.parametrize(("counts", "first"), ROWS, ids=str)
def test_grouped_gemm(counts: list[int], first: int, width: int, columns: int, transposed: bool):
    # Triton's interpreter multiplies bfloat16 wrongly
    check_grouped_gemm(
        counts, first, width, columns=columns, dtype=torch.float16, transposed=transposed
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_gemm_of_fp32(transposed: bool):
    check_grouped_gemm([3, 70, 66], 1, 20, columns=68, dtype=torch.float32, transposed=transposed)


@pytest.mark.parametrize("programs", chosen([1, 2, 3, 5], [1, 3]))
def test_programs_that_have_several_tiles(programs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.kernels.grouped_gemm.PROGRAMS", programs)
    check_grouped_gemm([5, 0, 300, 3, 129], 1, 40, columns=264, dtype=torch.float16)


def test_no_rows_at_all():
    nothing, ends_E = torch.zeros(0, 8, device=DEVICE), torch.zeros(2, device=DEVICE).int()
    grouped_gemm(nothing, nothing, torch.ones(1, 8, 8, device=DEVICE), ends_E, first=1)


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(("block", "programs"), [(16, 2), (4096, 264)])
def test_clones(
    size: tuple[int, int, int, tuple[int, int]],
    dtype: torch.dtype,
    block: int,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("app.kernels.clones.weights.BLOCK", block)
    monkeypatch.setattr("app.kernels.clones.weights.PROGRAMS", programs)
    for seed, full in enumerate((2 / 3, 1.0, 0.0)):
        drawn = draw_clones(*size, dtype=dtype, seed=seed, full=full)
        check_push_clones(drawn)
        check_add_clones(drawn, dtype)
