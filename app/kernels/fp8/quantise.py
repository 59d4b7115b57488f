"""Matrices in FP8 (E4M3), a scale for each row, in one launch.

An entry is multiplied with its scale, E4M3's largest number over the largest entry that shares it,
and rounded to the nearest. What is kept of a scale is its reciprocal, which products multiply with.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, norm_tiling

E4M3 = torch.float8_e4m3fn
Fp8Rows = tuple[Tensor, Tensor]  # rows in FP8, R × C, and the reciprocals of their scales
PROGRAMS = 16  # that a multiprocessor runs at once


def empty_fp8_rows(shape: Sequence[int], device: torch.device) -> Fp8Rows:
    """Memory for so many rows and columns."""
    data_RC = torch.empty(shape, dtype=E4M3, device=device)
    return data_RC, torch.empty(len(data_RC), dtype=torch.float32, device=device)


def quantise_rows(x_RC: Tensor, used: Tensor | None = None) -> Fp8Rows:
    """in FP8, R × C, and the reciprocals of the rows' scales, fp32 [R]; fp32, bf16 or fp16.

    `used`, of one int32 on the device, is how many of the rows count: those behind them are neither
    read nor written.
    """
    made = empty_fp8_rows(x_RC.shape, x_RC.device)
    quantise_rows_into(x_RC, *made, used)
    return made


def quantise_rows_into(
    x_RC: Tensor, data_RC: Tensor, scales_R: Tensor, used: Tensor | None = None
) -> None:
    """The same in memory that is there."""
    rows, columns = x_RC.shape
    if not rows:
        return
    tiling = norm_tiling(columns)
    programs = tiling.tiles(rows)
    if used is not None:  # only the device knows how many: as many programs as run at once
        programs = min(programs, MULTIPROCESSORS * PROGRAMS)
    _by_rows[(programs,)](
        x_RC.contiguous(),
        data_RC,
        scales_R,
        used,
        rows,
        columns,
        HEIGHT=tiling.height,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
    )


@jit
def reciprocal(scale: tl.tensor) -> tl.tensor:
    """Rounded as torch does; what products multiply with in place of a scale."""
    return tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@jit
def scale_for(largest: tl.tensor) -> tl.tensor:
    """What to multiply with, so that this becomes 448, E4M3's largest number; at most fp32's, and 1
    for 0 or what is not finite.
    """
    most = 3.4028234663852886e38
    fits = (largest > 0) & (largest <= most)
    # two roundings, as torch divides a number by a tensor
    scale = reciprocal(tl.where(fits, largest, 1.0)) * 448.0
    return tl.where(fits, tl.minimum(scale, most), 1.0)


@jit
def in_fp8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """x · scale in E4M3; what is larger than its largest number becomes that, NaN stays NaN: so
    GPUs convert, which know no other way (`cvt.rn.satfinite`).
    """
    return (x * scale).to(tl.float8e4nv)


@jit
def _by_rows(
    x_RC: tl.tensor,
    data_RC: tl.tensor,
    scales_R: tl.tensor,
    used: tl.tensor,
    rows: int,
    columns: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    if used is not None:
        rows = tl.minimum(rows, tl.load(used))
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT), tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        column = tl.arange(0, COLUMNS)[None, :]
        # R·C may exceed 32 bits
        place = row[:, None].to(tl.int64) * columns + column
        exists = (row < rows)[:, None] & (column < columns)
        x = tl.load(x_RC + place, mask=exists, other=0.0).to(tl.float32)
        scale = scale_for(tl.max(tl.abs(x), axis=1))
        tl.store(data_RC + place, in_fp8(x, scale[:, None]), mask=exists)
        tl.store(scales_R + row, reciprocal(scale), mask=row < rows)
