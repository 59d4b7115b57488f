"""Sum of the partial weight gradients that the programs of a kernel have written.

Shapes: J programs, W values of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import cdiv

# tile of a program: 16 values per thread, 64 contiguous bytes of a row
ROWS, COLUMNS, WARPS = 256, 16, 8


def summed(partial_JW: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Σ_j partial[j], fp32, in an order that only depends on J, rounded once."""
    total_W = partial_JW.new_empty(partial_JW.shape[1], dtype=dtype)
    _launch(total_W, partial_JW, adds=False)
    return total_W


def add_summed(total_W: Tensor, partial_JW: Tensor) -> None:
    """Add Σ_j partial[j] to `total`, in the same order in fp32, rounded once to the dtype of
    `total`.
    """
    _launch(total_W, partial_JW, adds=True)


def _launch(total_W: Tensor, partial_JW: Tensor, adds: bool) -> None:
    count, width = partial_JW.shape
    _sum[(cdiv(width, COLUMNS),)](
        total_W=total_W,
        partial_JW=partial_JW,
        count=count,
        width=width,
        ADDS=adds,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


@jit
def _sum(
    total_W: tl.tensor,
    partial_JW: tl.tensor,
    count: int,
    width: int,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        exists = (row < count) & (column < width)[None, :]
        sums += tl.load(partial_JW + row * width + column[None, :], mask=exists, other=0.0)
    total = tl.sum(sums, 0)
    if ADDS:
        total += tl.load(total_W + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(total_W + column, total, mask=column < width)
