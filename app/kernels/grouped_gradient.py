"""Grouped GEMM of experts' weight gradients that accumulates into the main gradients.

For GPUs with TMA (`moves_tiles`); on others registers spill.

Shapes: T rows grouped by expert, E experts, I input width, O output width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import TensorDescriptor, jit, tl
from app.kernels.tiling import cdiv

TILE = (128, 128, 32)  # rows and columns of an expert's I × O per program; T rows per step
TILE_FP32 = (64, 64, 16)  # without tensor cores the operands take registers too
# two programs per multiprocessor: one loads sums while the other multiplies
OPTIONS = {"num_warps": 4, "num_stages": 6}


def add_grouped_gradient(
    sums_EIO: Tensor,
    rows_TI: Tensor,
    grad_TO: Tensor,
    ends_E: Tensor,
    first: int = 0,
    adds: bool = True,
    fills: bool = False,
) -> None:
    """Compute sums[e] += rows[e]ᵀ · grad[e]: in fp32, rounded once to the dtype of `sums`.

    Expert e owns rows ends[first+e-1] to ends[first+e] (int32, read on the device), from row 0 on
    if no expert precedes it. Experts without rows keep their sums, and rows of no expert are
    ignored. Without `adds` the previous sums are overwritten instead of added to; experts without
    rows keep them, or get zeros with `fills`. Rows are bf16, fp16 or fp32; matrices and each of
    their rows start at a multiple of 16 bytes (AssertionError). Equal calls give equal bits.
    """
    experts, width, columns = sums_EIO.shape
    if not len(rows_TI):  # a TMA descriptor cannot be empty
        if fills:
            sums_EIO.zero_()
        return
    height, across, step = TILE_FP32 if rows_TI.dtype == torch.float32 else TILE
    grid = (cdiv(width, height) * cdiv(columns, across), experts)
    _grouped_gradient[grid](
        sums_EIO=TensorDescriptor.from_tensor(sums_EIO, [1, height, across]),
        rows_TI=TensorDescriptor.from_tensor(rows_TI.contiguous(), [step, height]),
        grad_TO=TensorDescriptor.from_tensor(grad_TO.contiguous(), [step, across]),
        ends_E=ends_E,
        first=first,
        columns=columns,
        ADDS=adds,
        FILLS=fills,
        HEIGHT=height,
        COLUMNS=across,
        STEP=step,
        **OPTIONS,
    )


@jit
def _grouped_gradient(
    sums_EIO: tl.tensor_descriptor,
    rows_TI: tl.tensor_descriptor,
    grad_TO: tl.tensor_descriptor,
    ends_E: tl.tensor,
    first: int,
    columns: int,
    ADDS: tl.constexpr,
    FILLS: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    expert = tl.program_id(1)
    across = tl.cdiv(columns, COLUMNS)
    i = tl.program_id(0) // across * HEIGHT
    o = tl.program_id(0) % across * COLUMNS
    group = first + expert
    begin = tl.load(ends_E + group - 1, mask=group > 0, other=0)
    end = tl.load(ends_E + group)
    if FILLS or end > begin:
        total = tl.zeros((HEIGHT, COLUMNS), tl.float32)
        rest = begin + (end - begin) // STEP * STEP
        for t in range(begin, rest, STEP):
            total = tl.dot(
                rows_TI.load([t, i]).T, grad_TO.load([t, o]), total, input_precision="ieee"
            )
        if rest < end:  # mask the rest: those rows belong to the next expert or to none
            own = (rest + tl.arange(0, STEP) < end)[:, None]
            left = tl.where(own, rows_TI.load([rest, i]), 0.0)
            right = tl.where(own, grad_TO.load([rest, o]), 0.0)
            total = tl.dot(left.T, right, total, input_precision="ieee")
        if ADDS:
            before = sums_EIO.load([expert, i, o]).reshape(HEIGHT, COLUMNS).to(tl.float32)
            total = before + total
        sums_EIO.store([expert, i, o], total.to(sums_EIO.dtype).reshape(1, HEIGHT, COLUMNS))
