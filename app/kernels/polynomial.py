"""Batched GEMMs of a polynomial of X·Xᵀ: products that are symmetric are computed once, and addends
are read where the product is stored.

For GPUs with TMA (`moves_tiles`), in bf16 or fp16. cuBLAS computes both halves of a symmetric
product, and `torch.baddbmm` copies its addend first.

Shapes: C matrices of M rows and N columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import TensorDescriptor, jit, moves_tiles, tl, usable
from app.kernels.tiling import cdiv

STEP = 64  # values of the summed dimension at a time
BAND = 8  # rows of tiles that follow each other, so that their operands stay in the L2 cache
SQUARE = {"ROWS": 128, "COLUMNS": 128, "num_warps": 4, "num_stages": 3}
WIDE = {"ROWS": 128, "COLUMNS": 256, "num_warps": 8, "num_stages": 4}
ALIGNMENT = 16  # bytes of rows, for TMA


def multiplies(matrices_CMN: Tensor) -> bool:
    """Return whether the kernels support these matrices."""
    return (
        usable(matrices_CMN)
        and matrices_CMN.dtype != torch.float32
        and moves_tiles(matrices_CMN.device)
        and all(
            size * matrices_CMN.element_size() % ALIGNMENT == 0 for size in matrices_CMN.shape[1:]
        )
    )


def gram(left_CMN: Tensor) -> Tensor:
    """Return left·leftᵀ, [C, M, M]; sums in fp32, rounded once."""
    return _multiply(left_CMN, left_CMN, 1.0, addend=None, beta=0.0, symmetric=True)


def squared(gram_CMM: Tensor, factor: float, beta: float) -> Tensor:
    """Return factor·gram·gram + beta·gram of symmetric matrices; sums in fp32, rounded once."""
    return _multiply(gram_CMM, gram_CMM, factor, addend=gram_CMM, beta=beta, symmetric=True)


def applied(poly_CMM: Tensor, matrices_CMN: Tensor, beta: float) -> Tensor:
    """Return poly·matrices + beta·matrices; sums in fp32, rounded once."""
    return _multiply(poly_CMM, matrices_CMN, 1.0, addend=matrices_CMN, beta=beta, symmetric=False)


def _multiply(
    left_CMK: Tensor,
    right: Tensor,
    alpha: float,
    *,
    addend: Tensor | None,
    beta: float,
    symmetric: bool,
) -> Tensor:
    """Return alpha·left·right + beta·addend; `symmetric`: of rightᵀ, and equal to its transpose."""
    count, rows, width = left_CMK.shape
    columns = rows if symmetric else right.shape[2]
    out_CMN = left_CMK.new_empty(count, rows, columns)
    tile = SQUARE if symmetric else WIDE
    block = [1, tile["COLUMNS"], STEP] if symmetric else [1, STEP, tile["COLUMNS"]]
    grid = (cdiv(rows, tile["ROWS"]) * cdiv(columns, tile["COLUMNS"]), count)
    _polynomial[grid](
        out_CMN,
        TensorDescriptor.from_tensor(left_CMK.contiguous(), [1, tile["ROWS"], STEP]),
        TensorDescriptor.from_tensor(right.contiguous(), block),
        addend,
        rows=rows,
        columns=columns,
        width=width,
        alpha=alpha,
        beta=beta,
        SYMMETRIC=symmetric,
        STEP=STEP,
        BAND=BAND,
        **tile,
    )
    return out_CMN


@jit
def _polynomial(
    out: tl.tensor,
    left: tl.tensor_descriptor,
    right: tl.tensor_descriptor,
    addend: tl.tensor,
    rows: int,
    columns: int,
    width: int,
    alpha: float,
    beta: float,
    SYMMETRIC: tl.constexpr,
    STEP: tl.constexpr,
    BAND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tile, matrix = tl.program_id(0), tl.program_id(1)
    across = tl.cdiv(columns, COLUMNS)
    top = tile // (BAND * across) * BAND
    height = min(tl.cdiv(rows, ROWS) - top, BAND)
    down = top + tile % (BAND * across) % height
    along = tile % (BAND * across) // height
    last = down if SYMMETRIC else along  # tiles above the diagonal are stored by those below it
    if along <= last:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, STEP):  # beyond `width`, loads give zeros
            a = left.load([matrix, down * ROWS, k]).reshape(ROWS, STEP)
            if SYMMETRIC:
                b = right.load([matrix, along * COLUMNS, k]).reshape(COLUMNS, STEP).T
            else:
                b = right.load([matrix, k, along * COLUMNS]).reshape(STEP, COLUMNS)
            total = tl.dot(a, b, total, input_precision="ieee")
        row = (down * ROWS + tl.arange(0, ROWS))[:, None]
        column = (along * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        start = matrix.to(tl.int64) * rows * columns
        inside = (row < rows) & (column < columns)
        at = start + row.to(tl.int64) * columns + column
        total *= alpha
        if addend is not None:
            total += beta * tl.load(addend + at, mask=inside, other=0.0).to(tl.float32)
        found = total.to(out.dtype.element_ty)
        tl.store(out + at, found, mask=inside)
        if SYMMETRIC and along < down:
            tl.store(out + start + column.to(tl.int64) * rows + row, found, mask=inside)
