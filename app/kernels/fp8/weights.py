"""Quantisation of experts' weights into both copies that grouped GEMMs read: one with a scale per
row, one transposed with a scale per column. Two launches each read the weights once: the first
finds the amax, the second writes both copies.

Shapes: E experts, I × O each; B blocks of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.quantise import Fp8Rows, in_fp8, reciprocal, scale_for
from app.kernels.tiling import cdiv

LOOKED_AT = (64, 64)  # rows and columns per tile of the amax pass
WRITTEN = (64, 64)  # rows and columns per tile of the writing pass
BLOCKS = 16  # blocks of rows whose amax is reduced at once
WARPS = 4
STAGES = 3  # tiles loaded ahead of the one being computed


def quantise_weight_into(x_EIO: Tensor, by_rows: Fp8Rows, by_columns: Fp8Rows) -> None:
    """Quantise into existing memory: data [E, I, O] with factors [E, I], and [E, O, I] with
    [E, O].
    """
    experts, height, width = x_EIO.shape
    (rows_EIO, rows_EI), (columns_EOI, columns_EO) = by_rows, by_columns
    tall, across = LOOKED_AT
    blocks = cdiv(height, tall)
    x_EIO = x_EIO.contiguous()
    scales_EI = torch.empty_like(rows_EI)
    of_columns_EBO = torch.empty(experts, blocks, width, dtype=torch.float32, device=x_EIO.device)
    _largest[(blocks, experts)](
        x_EIO,
        scales_EI,
        rows_EI,
        of_columns_EBO,
        height,
        width,
        HEIGHT=tall,
        ACROSS=across,
        STAGES=STAGES,
        num_warps=WARPS,
    )
    step, across = WRITTEN
    _both[(cdiv(width, across), experts)](
        x_EIO,
        scales_EI,
        of_columns_EBO,
        rows_EIO,
        columns_EOI,
        columns_EO,
        height,
        width,
        blocks,
        STEP=step,
        ACROSS=across,
        BLOCKS=BLOCKS,
        STAGES=STAGES,
        num_warps=WARPS,
    )


@jit
def _largest(
    x_EIO: tl.tensor,
    scales_EI: tl.tensor,
    rows_EI: tl.tensor,
    of_columns_EBO: tl.tensor,
    height: int,
    width: int,
    HEIGHT: tl.constexpr,
    ACROSS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    expert = tl.program_id(1).to(tl.int64)
    row = block * HEIGHT + tl.arange(0, HEIGHT)
    line = (expert * height + row)[:, None] * width
    largest = tl.zeros((HEIGHT, ACROSS), tl.float32)
    for start in tl.range(0, width, ACROSS, num_stages=STAGES):
        column = start + tl.arange(0, ACROSS)
        exists = (row < height)[:, None] & (column < width)[None, :]
        x = tl.load(x_EIO + line + column[None, :], mask=exists, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        place = (expert * tl.num_programs(0) + block) * width + column
        tl.store(of_columns_EBO + place, tl.max(tl.abs(x), axis=0), mask=column < width)
    scale = scale_for(tl.max(largest, axis=1))
    tl.store(scales_EI + expert * height + row, scale, mask=row < height)
    tl.store(rows_EI + expert * height + row, reciprocal(scale), mask=row < height)


@jit
def _both(
    x_EIO: tl.tensor,
    scales_EI: tl.tensor,
    of_columns_EBO: tl.tensor,
    rows_EIO: tl.tensor,
    columns_EOI: tl.tensor,
    columns_EO: tl.tensor,
    height: int,
    width: int,
    blocks: int,
    STEP: tl.constexpr,
    ACROSS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    column = tl.program_id(0) * ACROSS + tl.arange(0, ACROSS)
    expert = tl.program_id(1).to(tl.int64)
    largest = tl.zeros((BLOCKS, ACROSS), tl.float32)
    for start in range(0, blocks, BLOCKS):
        block = start + tl.arange(0, BLOCKS)
        there = (block < blocks)[:, None] & (column < width)[None, :]
        place = (expert * blocks + block)[:, None] * width + column[None, :]
        largest = tl.maximum(largest, tl.load(of_columns_EBO + place, mask=there, other=0.0))
    down = scale_for(tl.max(largest, axis=0))
    tl.store(columns_EO + expert * width + column, reciprocal(down), mask=column < width)
    matrix = expert * height * width
    for start in tl.range(0, height, STEP, num_stages=STAGES):
        row = start + tl.arange(0, STEP)
        exists = (row < height)[:, None] & (column < width)[None, :]
        place = matrix + row[:, None] * width + column[None, :]
        x = tl.load(x_EIO + place, mask=exists, other=0.0).to(tl.float32)
        along = tl.load(scales_EI + expert * height + row, mask=row < height, other=0.0)
        tl.store(rows_EIO + place, in_fp8(x, along[:, None]), mask=exists)
        transposed = matrix + column[:, None] * height + row[None, :]
        narrow = tl.trans(in_fp8(x, down[None, :]))
        tl.store(columns_EOI + transposed, narrow, mask=tl.trans(exists))
