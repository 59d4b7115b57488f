"""Quantisation of matrices to FP8 (E4M3) with a scale per row, in one launch.

An entry is multiplied with its scale, E4M3's maximum over the row's amax, and rounded to nearest.
The reciprocal of the scale is kept, which GEMMs multiply with.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, norm_tiling

E4M3 = torch.float8_e4m3fn
Fp8Rows = tuple[Tensor, Tensor]  # FP8 data R × C, and the reciprocals of the rows' scales
PROGRAMS = 16  # resident programs per multiprocessor


def empty_fp8_rows(shape: Sequence[int], device: torch.device) -> Fp8Rows:
    """Allocate FP8 data and factors for this shape."""
    data_RC = torch.empty(shape, dtype=E4M3, device=device)
    return data_RC, torch.empty(len(data_RC), dtype=torch.float32, device=device)


def quantise_rows(x_RC: Tensor, used: Tensor | None = None) -> Fp8Rows:
    """Return the rows in FP8, R × C, and the reciprocals of their scales, fp32 [R]; takes fp32,
    bf16 or fp16.

    `used`, one int32 on the device, is the number of valid rows: later ones are neither read nor
    written.
    """
    made = empty_fp8_rows(x_RC.shape, x_RC.device)
    quantise_rows_into(x_RC, *made, used)
    return made


def quantise_rows_into(
    x_RC: Tensor, data_RC: Tensor, scales_R: Tensor, used: Tensor | None = None
) -> None:
    """Quantise into existing memory."""
    rows, columns = x_RC.shape
    if not rows:
        return
    tiling = norm_tiling(columns)
    programs = tiling.tiles(rows)
    if used is not None:
        # only the device knows the number of rows: a resident set of programs loops over them
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
    """Return 1 / scale, rounded as torch does: the factor that GEMMs multiply with."""
    return tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@jit
def scale_for(largest: tl.tensor) -> tl.tensor:
    """Return the factor that maps this amax to 448, E4M3's maximum; at most fp32's maximum, and 1
    for 0 or a value that is not finite.
    """
    most = 3.4028234663852886e38
    fits = (largest > 0) & (largest <= most)
    # two roundings, as in torch's division of a number by a tensor
    scale = reciprocal(tl.where(fits, largest, 1.0)) * 448.0
    return tl.where(fits, tl.minimum(scale, most), 1.0)


@jit
def in_fp8(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return x · scale in E4M3, clipped to its maximum; NaN stays NaN. This is the only conversion
    GPUs have (`cvt.rn.satfinite`).
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
