"""GEMMs of a polynomial of X·Xᵀ against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.kernels import polynomial
from app.kernels.polynomial import applied, gram, squared

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# the interpreter loads no tiles of bf16
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
SHAPES = [(2, 128, 256), (3, 40, 72), (1, 136, 200)]


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, DTYPE)


def errors(found: Tensor, wanted: Tensor, summed: Tensor) -> Tensor:
    """Error over what rounding once and fp32 sums may cost."""
    bound = wanted.abs() * torch.finfo(DTYPE).eps + summed * 2**-20
    return (found.double() - wanted).abs() / bound


@pytest.fixture(autouse=True)
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles and bands of small matrices."""
    if DEVICE.type == "cpu":
        monkeypatch.setitem(polynomial.SQUARE, "ROWS", 32)
        monkeypatch.setitem(polynomial.SQUARE, "COLUMNS", 32)
        monkeypatch.setitem(polynomial.WIDE, "ROWS", 32)
        monkeypatch.setitem(polynomial.WIDE, "COLUMNS", 64)
        monkeypatch.setattr(polynomial, "BAND", 2)


@pytest.mark.every(3)
@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_fp64(shape: tuple[int, int, int], tall: bool):
    count, rows, columns = shape
    matrices = drawn(count, rows, columns) / 8
    if tall:  # every other one of a stack
        matrices = torch.stack((matrices.mT, matrices.mT), dim=1)[:, 1].mT
        assert matrices.stride() == (2 * rows * columns, 1, rows)
    wide = matrices.double()
    found = gram(matrices)
    assert errors(found, wide @ wide.mT, wide.abs() @ wide.mT.abs()).max() <= 1
    wide_gram = found.double()
    poly = squared(found, 2.0315, -4.775)
    wanted = 2.0315 * wide_gram @ wide_gram.mT - 4.775 * wide_gram
    sums = 2.0315 * wide_gram.abs() @ wide_gram.mT.abs() + 4.775 * wide_gram.abs()
    assert errors(poly, wanted, sums).max() <= 1
    poly = poly.tril() + poly.tril(-1).mT  # tiles on the diagonal are symmetric on GPUs only
    wanted = poly.double() @ wide + 3.4445 * wide
    sums = poly.double().abs() @ wide.abs() + 3.4445 * wide.abs()
    last = applied(poly, matrices, 3.4445)
    assert last.stride()[1:] == matrices.stride()[1:]
    assert errors(last, wanted, sums).max() <= 1
