"""Batched GEMMs of a polynomial of X·Xᵀ: half of a symmetric result is computed, and addends are
read where the result is stored.

For GPUs with TMA (`moves_tiles`), in bf16 or fp16. cuBLAS computes both halves of a symmetric
result, and `torch.baddbmm` copies its addend first.

Shapes: C matrices of M rows and N columns, of which rows or columns are consecutive.
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
    if not usable(matrices_CMN) or matrices_CMN.dtype == torch.float32:
        return False
    matrix, row, column = matrices_CMN.stride()
    starts = (
        matrices_CMN.data_ptr(),
        *(size * matrices_CMN.element_size() for size in (matrix, max(row, column))),
    )
    square = matrices_CMN.shape[1] * matrices_CMN.element_size()
    return (
        moves_tiles(matrices_CMN.device)
        and min(row, column) == 1
        and all(start % ALIGNMENT == 0 for start in (*starts, square))
    )


def gram(matrices_CMN: Tensor) -> Tensor:
    """Return matrices·matricesᵀ, [C, M, M]; sums in fp32, rounded once."""
    return _multiply(matrices_CMN, matrices_CMN, 1.0, addend=None, beta=0.0, symmetric=True)


def squared(gram_CMM: Tensor, factor: float, beta: float) -> Tensor:
    """Return factor·gram·gram + beta·gram of symmetric matrices; sums in fp32, rounded once."""
    return _multiply(gram_CMM, gram_CMM, factor, addend=gram_CMM, beta=beta, symmetric=True)


def applied(poly_CMM: Tensor, matrices_CMN: Tensor, beta: float) -> Tensor:
    """Return poly·matrices + beta·matrices for symmetric `poly`, in the order of `matrices`; sums
    in fp32, rounded once.
    """
    if matrices_CMN.stride(2) != 1:
        tall = matrices_CMN.mT
        return _multiply(tall, poly_CMM, 1.0, addend=tall, beta=beta, symmetric=False).mT
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
    by_columns = left_CMK.stride(2) != 1  # both operands, of a symmetric result
    if by_columns:
        left_CMK, right = left_CMK.mT, right.mT
    left_block = [1, STEP, tile["ROWS"]] if by_columns else [1, tile["ROWS"], STEP]
    by_steps = by_columns or not symmetric
    right_block = [1, STEP, tile["COLUMNS"]] if by_steps else [1, tile["COLUMNS"], STEP]
    grid = (cdiv(rows, tile["ROWS"]) * cdiv(columns, tile["COLUMNS"]), count)
    _polynomial[grid](
        out_CMN,
        TensorDescriptor.from_tensor(left_CMK, left_block),
        TensorDescriptor.from_tensor(right, right_block),
        addend,
        addend_matrix=0 if addend is None else addend.stride(0),
        addend_row=0 if addend is None else addend.stride(1),
        rows=rows,
        columns=columns,
        width=width,
        alpha=alpha,
        beta=beta,
        SYMMETRIC=symmetric,
        BY_COLUMNS=by_columns,
        BY_STEPS=by_steps,
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
    addend_matrix: int,
    addend_row: int,
    rows: int,
    columns: int,
    width: int,
    alpha: float,
    beta: float,
    SYMMETRIC: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    BY_STEPS: tl.constexpr,
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
            if BY_COLUMNS:
                a = left.load([matrix, k, down * ROWS]).reshape(STEP, ROWS).T
            else:
                a = left.load([matrix, down * ROWS, k]).reshape(ROWS, STEP)
            if BY_STEPS:
                b = right.load([matrix, k, along * COLUMNS]).reshape(STEP, COLUMNS)
            else:
                b = right.load([matrix, along * COLUMNS, k]).reshape(COLUMNS, STEP).T
            total = tl.dot(a, b, total, input_precision="ieee")
        row = (down * ROWS + tl.arange(0, ROWS))[:, None]
        column = (along * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        start = matrix.to(tl.int64) * rows * columns
        inside = (row < rows) & (column < columns)
        total *= alpha
        if addend is not None:
            added = addend + matrix.to(tl.int64) * addend_matrix + row * addend_row + column
            total += beta * tl.load(added, mask=inside, other=0.0).to(tl.float32)
        found = total.to(out.dtype.element_ty)
        tl.store(out + start + row * columns + column, found, mask=inside)
        if SYMMETRIC and along < down:
            tl.store(out + start + column * rows + row, found, mask=inside)
