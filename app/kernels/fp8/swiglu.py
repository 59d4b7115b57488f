"""SwiGLU activation of experts that also writes its result in FP8, so that rows are not read again
to be quantised.

Shapes: R rows, F hidden width of an expert; the gate is the first half of a row of `both`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.quantise import empty_fp8_rows, in_fp8, reciprocal, scale_for
from app.kernels.tiling import MULTIPROCESSORS, block_of, cdiv

InBoth = tuple[Tensor, Tensor, Tensor]  # unquantised rows, FP8 data, factors of the rows
PER_WARP = 256  # columns per warp at once: 8 per thread, 16 bytes of bf16
PARTS = 4  # parts of a row per thread, each in registers of its own
TOGETHER = 8  # warps per program, each with one row if rows are short
WARPS = 16  # at most, sharing a row
PROGRAMS = 16  # resident programs per multiprocessor


def swiglu_rows(both_R2F: Tensor, used: Tensor) -> InBoth:
    """Map [R, 2F] -> [R, F], computed in fp32 and rounded once; also return the result in FP8.

    fp32, bf16 or fp16. `used`, one int32 on the device, is the number of valid rows: later ones are
    neither read nor written.
    """
    rows, double = both_R2F.shape
    made = _empty(both_R2F, rows, double // 2)
    _launch(_forward, (both_R2F,), made, used=used)
    return made


def swiglu_rows_gradient(grad_RF: Tensor, both_R2F: Tensor, used: Tensor) -> InBoth:
    """Return the gradient of `both`, plain and in FP8, from that of the result."""
    made = _empty(both_R2F, *both_R2F.shape)
    _launch(_backward, (grad_RF.contiguous(), both_R2F), made, used=used)
    return made


def _empty(like: Tensor, rows: int, columns: int) -> InBoth:
    return like.new_empty(rows, columns), *empty_fp8_rows((rows, columns), like.device)


def _launch(kernel: Any, read: Sequence[Tensor], made: InBoth, *, used: Tensor) -> None:
    """Launch a resident set of programs that loop over the rows, as only the device knows their
    number. The last tensor read is R × 2F.
    """
    rows, double = read[-1].shape
    width = double // 2
    across = min(WARPS, block_of(cdiv(width, PER_WARP * PARTS)))  # warps that share a row
    height, columns = max(1, TOGETHER // across), PER_WARP * across
    programs = min(cdiv(rows, height), MULTIPROCESSORS * PROGRAMS)
    if not programs:
        return
    kernel[(programs,)](
        *read,
        *made,
        used,
        rows,
        width,
        HEIGHT=height,
        COLUMNS=columns,
        PARTS=cdiv(width, columns),
        num_warps=height * across,
    )


@jit
def _place(
    row: tl.tensor, rows: int, width: int, COLUMNS: tl.constexpr, part: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return offsets of a part of some rows' columns in [R, F] and [R, 2F], and which of them
    exist.
    """
    column = part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    line = row[:, None].to(tl.int64) * width  # R·2F may exceed 32 bits
    return line + column, 2 * line + column, (row < rows)[:, None] & (column < width)


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
    PARTS: tl.constexpr,
) -> None:
    rows = tl.minimum(rows, tl.load(used))
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT), tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        read = ()  # type: tuple[tuple[tl.tensor, tl.tensor], ...]
        for part in tl.static_range(PARTS):  # issue all loads before the first is used
            _, double, exists = _place(row, rows, width, COLUMNS=COLUMNS, part=part)
            gate = tl.load(both_R2F + double, mask=exists, other=0.0)
            up = tl.load(both_R2F + double + width, mask=exists, other=0.0)
            read += ((gate, up),)
        made = ()  # type: tuple[tl.tensor, ...]
        largest = tl.zeros((HEIGHT, COLUMNS), tl.float32)
        for part in tl.static_range(PARTS):
            single, _, exists = _place(row, rows, width, COLUMNS=COLUMNS, part=part)
            gate = read[part][0].to(tl.float32)
            act = gate * tl.sigmoid(gate) * read[part][1].to(tl.float32)
            act = act.to(act_RF.dtype.element_ty)
            tl.store(act_RF + single, act, mask=exists)
            largest = tl.maximum(largest, tl.abs(act.to(tl.float32)))
            made += (act,)
        scale = scale_for(tl.max(largest, axis=1))
        tl.store(scales_R + row, reciprocal(scale), mask=row < rows)
        for part in tl.static_range(PARTS):
            single, _, exists = _place(row, rows, width, COLUMNS=COLUMNS, part=part)
            narrow = in_fp8(made[part].to(tl.float32), scale[:, None])
            tl.store(data_RF + single, narrow, mask=exists)


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
    PARTS: tl.constexpr,
) -> None:
    rows = tl.minimum(rows, tl.load(used))
    of = grad_both_R2F.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT), tl.num_programs(0)):
        row = tile * HEIGHT + tl.arange(0, HEIGHT)
        read = ()  # type: tuple[tuple[tl.tensor, tl.tensor, tl.tensor], ...]
        for part in tl.static_range(PARTS):  # issue all loads before the first is used
            single, double, exists = _place(row, rows, width, COLUMNS=COLUMNS, part=part)
            grad = tl.load(grad_RF + single, mask=exists, other=0.0)
            gate = tl.load(both_R2F + double, mask=exists, other=0.0)
            up = tl.load(both_R2F + double + width, mask=exists, other=0.0)
            read += ((grad, gate, up),)
        made = ()  # type: tuple[tuple[tl.tensor, tl.tensor], ...]
        largest = tl.zeros((HEIGHT, COLUMNS), tl.float32)
        for part in tl.static_range(PARTS):
            _, double, exists = _place(row, rows, width, COLUMNS=COLUMNS, part=part)
            grad = read[part][0].to(tl.float32)
            gate = read[part][1].to(tl.float32)
            passed = tl.sigmoid(gate)
            slope = passed * (1.0 + gate * (1.0 - passed))
            of_gate = (grad * read[part][2].to(tl.float32) * slope).to(of)
            of_up = (grad * gate * passed).to(of)
            tl.store(grad_both_R2F + double, of_gate, mask=exists)
            tl.store(grad_both_R2F + double + width, of_up, mask=exists)
            largest = tl.maximum(largest, tl.abs(of_gate.to(tl.float32)))
            largest = tl.maximum(largest, tl.abs(of_up.to(tl.float32)))
            made += ((of_gate, of_up),)
        scale = scale_for(tl.max(largest, axis=1))
        tl.store(scales_R + row, reciprocal(scale), mask=row < rows)
        for part in tl.static_range(PARTS):
            _, double, exists = _place(row, rows, width, COLUMNS=COLUMNS, part=part)
            left = in_fp8(made[part][0].to(tl.float32), scale[:, None])
            right = in_fp8(made[part][1].to(tl.float32), scale[:, None])
            tl.store(data_R2F + double, left, mask=exists)
            tl.store(data_R2F + double + width, right, mask=exists)
