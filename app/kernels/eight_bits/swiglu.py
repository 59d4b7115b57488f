"""silu(gate) · up between the products of experts, with what it makes in eight bits besides: rows
are not read again to be quantised.

Shapes: R rows, F hidden width of an expert; the gate is the first half of a row of `both`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.eight_bits.quantise import PROGRAMS, empty_in_8, in_eight, reciprocal, scale_for
from app.kernels.tiling import MULTIPROCESSORS, norm_tiling

InBoth = tuple[Tensor, Tensor, Tensor]  # as it is, in eight bits, the factors of its rows


def swiglu_rows(both_R2F: Tensor, used: Tensor) -> InBoth:
    """[R, 2F] -> [R, F], computed in fp32 and rounded once; in eight bits what that has become.

    fp32, bf16 or fp16. `used`, of one int32 on the device, is how many of the rows count: those
    behind them are neither read nor written.
    """
    rows, double = both_R2F.shape
    made = _empty(both_R2F, rows, double // 2)
    _launch(_forward, (both_R2F,), made, used=used)
    return made


def swiglu_rows_gradient(grad_RF: Tensor, both_R2F: Tensor, used: Tensor) -> InBoth:
    """The gradient of `both`, of that of the result."""
    made = _empty(both_R2F, *both_R2F.shape)
    _launch(_backward, (grad_RF.contiguous(), both_R2F), made, used=used)
    return made


def _empty(like: Tensor, rows: int, columns: int) -> InBoth:
    return like.new_empty(rows, columns), *empty_in_8((rows, columns), like.device)


def _launch(kernel: Any, read: Sequence[Tensor], made: InBoth, *, used: Tensor) -> None:
    """By as many programs as run at once, as only the device knows how many rows count. Of what is
    read the last is R × 2F.
    """
    rows, double = read[-1].shape
    tiling = norm_tiling(double // 2)
    programs = min(tiling.tiles(rows), MULTIPROCESSORS * PROGRAMS)
    if not programs:
        return
    kernel[(programs,)](
        *read,
        *made,
        used,
        rows,
        double // 2,
        HEIGHT=tiling.height,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
    )


@jit
def _forward(
    both_R2F: tl.tensor,
    act_RF: tl.tensor,
    data_RF: tl.tensor,
    scales_R: tl.tensor,
    used: tl.tensor,
    rows: int,
    width: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.minimum(rows, tl.load(used))
    column = tl.arange(0, COLUMNS)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT), tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        exists = (row < rows)[:, None] & (column < width)
        line = row[:, None].to(tl.int64) * width  # R·2F may exceed 32 bits
        double = both_R2F + 2 * line + column
        gate = tl.load(double, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(double + width, mask=exists, other=0.0).to(tl.float32)
        act = (gate * tl.sigmoid(gate) * up).to(act_RF.dtype.element_ty)
        tl.store(act_RF + line + column, act, mask=exists)
        wide = act.to(tl.float32)
        scale = scale_for(tl.max(tl.abs(wide), axis=1))
        tl.store(data_RF + line + column, in_eight(wide, scale[:, None]), mask=exists)
        tl.store(scales_R + row, reciprocal(scale), mask=row < rows)


@jit
def _backward(
    grad_RF: tl.tensor,
    both_R2F: tl.tensor,
    grad_both_R2F: tl.tensor,
    data_R2F: tl.tensor,
    scales_R: tl.tensor,
    used: tl.tensor,
    rows: int,
    width: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows = tl.minimum(rows, tl.load(used))
    column = tl.arange(0, COLUMNS)[None, :]
    of = grad_both_R2F.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT), tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        exists = (row < rows)[:, None] & (column < width)
        line = row[:, None].to(tl.int64) * width
        double = 2 * line + column
        grad = tl.load(grad_RF + line + column, mask=exists, other=0.0).to(tl.float32)
        gate = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
        passed = tl.sigmoid(gate)
        slope = passed * (1.0 + gate * (1.0 - passed))
        of_gate = (grad * up * slope).to(of)
        of_up = (grad * gate * passed).to(of)
        tl.store(grad_both_R2F + double, of_gate, mask=exists)
        tl.store(grad_both_R2F + double + width, of_up, mask=exists)
        left = of_gate.to(tl.float32)
        right = of_up.to(tl.float32)
        largest = tl.max(tl.maximum(tl.abs(left), tl.abs(right)), axis=1)
        scale = scale_for(largest)
        tl.store(data_R2F + double, in_eight(left, scale[:, None]), mask=exists)
        tl.store(data_R2F + double + width, in_eight(right, scale[:, None]), mask=exists)
        tl.store(scales_R + row, reciprocal(scale), mask=row < rows)
