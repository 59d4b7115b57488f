"""Grouped GEMM whose group offsets only the device knows.

For GPUs with TMA (`moves_tiles`).

Shapes: T rows, grouped · E groups · G of them with a matrix here, from group `first` on · I and O:
height and width of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import TensorDescriptor, jit, tl
from app.kernels.tiling import MULTIPROCESSORS, cdiv

# tile of the output per program: rows, columns; and values of K per step
TILE = (128, 128, 64)
TILE_FP32 = (64, 64, 16)  # without tensor cores the operands take registers too
OPTIONS = {"num_warps": 4, "num_stages": 3}
# two programs per multiprocessor: one stores its tile while the other multiplies
PROGRAMS = 2 * MULTIPROCESSORS


def grouped_gemm(
    out_TO: Tensor,
    rows_TI: Tensor,
    weight_GIO: Tensor,
    ends_E: Tensor,
    first: int,
    transposed: bool = False,
) -> None:
    """Compute out[t] = rows[t] · weight[g] for all rows t of groups first + g; writes no other row.

    Group e has rows ends[e-1] to ends[e] (int32, read on the device), from 0 on if e is 0.
    `transposed`: times weight[g]ᵀ, so that rows are [T, O] and `out` is [T, I]. All have one dtype,
    bf16, fp16 or fp32; accumulates in fp32, rounds once. Rows and matrices, and each of their rows,
    start at a multiple of 16 bytes (AssertionError). A row's bits depend only on that row and its
    matrix.
    """
    groups = len(weight_GIO)
    width, columns = (weight_GIO.mT if transposed else weight_GIO).shape[1:]
    assert rows_TI.shape[1] == width and out_TO.shape == (len(rows_TI), columns)
    assert rows_TI.dtype == weight_GIO.dtype == out_TO.dtype and out_TO.is_contiguous()
    if not len(rows_TI):  # a TMA descriptor cannot be empty
        return
    height, across, step = TILE_FP32 if rows_TI.dtype == torch.float32 else TILE
    block = [1, across, step] if transposed else [1, step, across]
    # upper bound of tiles, wherever groups end: each group may have one partial tile of rows
    most = (len(rows_TI) // height + groups) * cdiv(columns, across)
    _grouped_gemm[(min(PROGRAMS, most),)](
        out_TO=out_TO,
        rows_TI=TensorDescriptor.from_tensor(rows_TI.contiguous(), [height, step]),
        weight_GIO=TensorDescriptor.from_tensor(weight_GIO, block),
        ends_E=ends_E,
        first=first,
        groups=groups,
        width=width,
        columns=columns,
        TRANSPOSED=transposed,
        HEIGHT=height,
        COLUMNS=across,
        STEP=step,
        **OPTIONS,
    )


@jit
def _grouped_gemm(
    out_TO: tl.tensor,
    rows_TI: tl.tensor_descriptor,
    weight_GIO: tl.tensor_descriptor,
    ends_E: tl.tensor,
    first: int,
    groups: int,
    width: int,
    columns: int,
    TRANSPOSED: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    across = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0)  # relative to the first tile of this group
    for group in range(groups):
        begin = tl.load(ends_E + first + group - 1, mask=first + group > 0, other=0)
        end = tl.load(ends_E + first + group)
        down = tl.cdiv(end - begin, HEIGHT)
        while tile < down * across:
            t = begin + tile % down * HEIGHT
            o = tile // down * COLUMNS
            total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
            for i in range(0, width, STEP):  # beyond `width`, loads give zeros
                left = rows_TI.load([t, i])
                if TRANSPOSED:
                    right = weight_GIO.load([group, o, i]).reshape(COLUMNS, STEP).T
                else:
                    right = weight_GIO.load([group, i, o]).reshape(STEP, COLUMNS)
                total = tl.dot(left, right, total, input_precision="ieee")
            row = t + tl.arange(0, HEIGHT)[:, None]
            column = o + tl.arange(0, COLUMNS)[None, :]
            tl.store(  # rows from `end` on belong to other groups
                out_TO + row.to(tl.int64) * columns + column,
                total.to(out_TO.dtype.element_ty),
                mask=(row < end) & (column < columns),
            )
            tile += tl.num_programs(0)
        tile -= down * across
