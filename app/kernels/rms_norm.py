"""RMSNorm x / rms(x) · weight over the last dimension (Zhang & Sennrich 2019): one pass per
direction.

Shapes: R rows, W width, J programs of backward. Backward program j takes every J-th tile of rows
and sums the weight's gradient over them in this order; another kernel sums the J results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import jit, tl
from app.kernels.partial_sums import summed
from app.kernels.tiling import NormTiling, norm_tiling

TakePartial = Callable[[Tensor], None]  # takes fp32 J × W, partial sums of a weight's gradient


def rms_norm(x: Tensor, weight_W: Tensor, eps: float, take: TakePartial | None = None) -> Tensor:
    """Map [..., W] -> [..., W] in x's dtype, computed in fp32 and rounded once.

    Saves `x`, the weight and one fp32 number per row for backward. Made for W up to 8192; fp32,
    bf16 or fp16. `take` receives the partial sums of the weight's gradient instead of autograd.
    """
    out: Tensor = _RmsNorm.apply(x.contiguous(), weight_W, eps, take)
    return out


def rms_norm_beside(
    x: Tensor, weight_W: Tensor, eps: float, take: TakePartial | None = None
) -> tuple[Tensor, Tensor]:
    """Return `x` itself, for the residual connection, and its `rms_norm`.

    One backward kernel computes the norm's gradient and adds the residual's in fp32, rounded once,
    instead of storing and adding two tensors. Saves and takes what `rms_norm` does.
    """
    beside, out = _RmsNormBeside.apply(x.contiguous(), weight_W, eps, take)
    return beside, out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_W: Tensor, eps: float, take: TakePartial | None
    ) -> Tensor:
        return _normed(ctx, x, weight_W, eps=eps, take=take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad, None), None, None


class _RmsNormBeside(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_W: Tensor, eps: float, take: TakePartial | None
    ) -> tuple[Tensor, Tensor]:
        return x, _normed(ctx, x, weight_W, eps=eps, take=take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, beside: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, grad, beside.contiguous()), None, None


def _normed(
    ctx: Any, x: Tensor, weight_W: Tensor, *, eps: float, take: TakePartial | None
) -> Tensor:
    """Return the norm, and what its backward needs."""
    width = x.shape[-1]
    rows = x.numel() // width
    inverse_R = x.new_empty(rows, dtype=torch.float32)
    ctx.save_for_backward(x, weight_W, inverse_R)
    ctx.take = take
    out = torch.empty_like(x)
    ctx.tiling = tiling = norm_tiling(width)
    _forward[(tiling.tiles(rows),)](
        x_RW=x,
        weight_W=weight_W,
        out_RW=out,
        inverse_R=inverse_R,
        rows=rows,
        width=width,
        eps=eps,
        HEIGHT=tiling.height,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
    )
    return out


def _gradients(ctx: Any, grad: Tensor, beside: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of `x`, including that of the residual (`beside`), and of the weight,
    unless `take` receives it.
    """
    x, weight_W, inverse_R = ctx.saved_tensors
    grad_x = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    tiling: NormTiling = ctx.tiling
    programs = tiling.programs(rows)
    partial_JW = x.new_empty(programs, width, dtype=torch.float32)
    _backward[(programs,)](
        grad_RW=grad.contiguous(),
        x_RW=x,
        weight_W=weight_W,
        inverse_R=inverse_R,
        beside_RW=beside,
        grad_x_RW=grad_x,
        partial_JW=partial_JW,
        rows=rows,
        width=width,
        tiles=tiling.tiles(rows),
        HEIGHT=tiling.height,
        COLUMNS=tiling.columns,
        num_warps=tiling.warps,
    )
    if ctx.take is None:
        return grad_x, summed(partial_JW, weight_W.dtype)
    ctx.take(partial_JW)
    return grad_x, None


@jit
def _forward(
    x_RW: tl.tensor,
    weight_W: tl.tensor,
    out_RW: tl.tensor,
    inverse_R: tl.tensor,
    rows: int,
    width: int,
    eps: float,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    # R·W may exceed 32 bits
    row = tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    exists = (row < rows) & (column < width)
    x = tl.load(x_RW + row * width + column, mask=exists, other=0.0).to(tl.float32)
    weight = tl.load(weight_W + column, mask=column < width, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1)[:, None] / width + eps)
    tl.store(inverse_R + row, inverse, mask=row < rows)
    tl.store(out_RW + row * width + column, x * inverse * weight, mask=exists)


@jit
def _backward(
    grad_RW: tl.tensor,
    x_RW: tl.tensor,
    weight_W: tl.tensor,
    inverse_R: tl.tensor,
    beside_RW: tl.tensor,
    grad_x_RW: tl.tensor,
    partial_JW: tl.tensor,
    rows: int,
    width: int,
    tiles: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    column = tl.arange(0, COLUMNS)[None, :]
    weight = tl.load(weight_W + column, mask=column < width, other=0.0).to(tl.float32)
    sums = tl.zeros((HEIGHT, COLUMNS), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        row_of_tile = tl.cast(tile, tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        row = row_of_tile[:, None]
        exists = (row < rows) & (column < width)
        grad = tl.load(grad_RW + row * width + column, mask=exists, other=0.0).to(tl.float32)
        x = tl.load(x_RW + row * width + column, mask=exists, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_R + row_of_tile, mask=row_of_tile < rows, other=0.0)[:, None]
        normed = x * inverse
        scaled = grad * weight
        sums += grad * normed
        along = tl.sum(scaled * normed, 1)[:, None] / width
        grad_x = (scaled - normed * along) * inverse
        if beside_RW is not None:
            beside = tl.load(beside_RW + row * width + column, mask=exists, other=0.0)
            grad_x += beside.to(tl.float32)
        tl.store(grad_x_RW + row * width + column, grad_x, mask=exists)
    at = partial_JW + tl.program_id(0) * width + column
    tl.store(at, tl.sum(sums, 0)[None, :], mask=column < width)
