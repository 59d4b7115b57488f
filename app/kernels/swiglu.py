"""silu(gate) · up (Shazeer 2020), between the products of a feed-forward: one pass per direction.

Shapes: R rows, F hidden width of the feed-forward; the gate is the first half of a row of `both`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of, cdiv

TILE = 2048  # values of the result per program: 16 per thread
COLUMNS = 512  # of a tile at most


def swiglu(both: Tensor) -> Tensor:
    """[..., 2F] -> [..., F], computed in fp32 and rounded once; keeps `both` alone for backward.

    fp32, bf16 or fp16.
    """
    act: Tensor = _Swiglu.apply(both.contiguous())
    return act


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        act = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        _launch(_forward, act, both, act)
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        grad_both = torch.empty_like(both)
        _launch(_backward, grad, grad.contiguous(), both, grad_both)
        return grad_both


def _launch(kernel: Any, act: Tensor, *tensors: Tensor) -> None:
    """Run over tiles of the result's shape."""
    width = act.shape[-1]
    rows = act.numel() // max(1, width)
    columns = min(block_of(width), COLUMNS)
    height = TILE // columns
    grid = (cdiv(rows, height), cdiv(width, columns))
    kernel[grid](*tensors, rows, width, HEIGHT=height, COLUMNS=columns)


@jit
def _tile(
    rows: int, width: int, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Offsets of this program's values in [R, F] and [R, 2F], and which of them exist."""
    # R·2F may exceed 32 bits
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row * width + column, row * (2 * width) + column, (row < rows) & (column < width)


@jit
def _forward(
    both_R2F: tl.tensor,
    act_RF: tl.tensor,
    rows: int,
    width: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    single, double, exists = _tile(rows, width, HEIGHT, COLUMNS=COLUMNS)
    gate = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
    tl.store(act_RF + single, gate * tl.sigmoid(gate) * up, mask=exists)


@jit
def _backward(
    grad_RF: tl.tensor,
    both_R2F: tl.tensor,
    grad_both_R2F: tl.tensor,
    rows: int,
    width: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    single, double, exists = _tile(rows, width, HEIGHT, COLUMNS=COLUMNS)
    grad = tl.load(grad_RF + single, mask=exists, other=0.0).to(tl.float32)
    gate = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
    passed = tl.sigmoid(gate)
    slope = passed * (1.0 + gate * (1.0 - passed))
    tl.store(grad_both_R2F + double, grad * up * slope, mask=exists)
    tl.store(grad_both_R2F + double + width, grad * gate * passed, mask=exists)
