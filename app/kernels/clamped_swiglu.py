"""Clamped SwiGLU of GPT-OSS (arXiv 2508.10925): (up + 1) · gate · sigmoid(alpha · gate), with the
gate at most a limit and up between −limit and limit; one pass per direction.

Shapes: R rows, F hidden width of the feed-forward; the gate is the first half of a row of `both`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import jit, tl, usable
from app.kernels.swiglu import launch, tile_of, tiles_of


def clamped_swiglu(both_R2F: Tensor, used: Tensor, *, limit: float, alpha: float) -> Tensor:
    """Map R × 2F -> R × F, computed in fp32 or wider and rounded once; saves only `both_R2F`.

    `used`, one int32 on the device, is the number of valid rows: a kernel, where there is one,
    neither reads nor writes later ones.
    """
    act: Tensor = _ClampedSwiglu.apply(both_R2F.contiguous(), used, limit, alpha)
    return act


class _ClampedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both_R2F: Tensor, used: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(both_R2F, used)
        ctx.limit, ctx.alpha = limit, alpha
        if not usable(both_R2F):
            gate, up = _clamped(both_R2F, limit)
            return ((up + 1) * gate * (alpha * gate).sigmoid()).to(both_R2F.dtype)
        act = both_R2F.new_empty(len(both_R2F), both_R2F.shape[1] // 2)
        launch(_forward, act, used, both_R2F, act, LIMIT=limit, ALPHA=alpha)
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> tuple[Tensor | None, ...]:
        both_R2F, used = ctx.saved_tensors
        limit, alpha = ctx.limit, ctx.alpha
        if usable(both_R2F):
            grad_R2F = torch.empty_like(both_R2F)
            grad_RF = grad_RF.contiguous()
            launch(_backward, grad_RF, used, grad_RF, both_R2F, grad_R2F, LIMIT=limit, ALPHA=alpha)
            return grad_R2F, None, None, None
        gate, up = _clamped(both_R2F, limit)
        passed = (alpha * gate).sigmoid()
        slope = passed * (1 + alpha * gate * (1 - passed))
        gate_within, up_within = both_R2F.chunk(2, dim=-1)
        gate_grad = grad_RF * (up + 1) * slope * (gate_within <= limit)
        up_grad = grad_RF * gate * passed * (up_within.abs() <= limit)
        return torch.cat((gate_grad, up_grad), dim=-1).to(both_R2F.dtype), None, None, None


def _clamped(both_R2F: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    wide_R2F = both_R2F.to(torch.promote_types(both_R2F.dtype, torch.float32))
    gate, up = wide_R2F.chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(-limit, limit)


@jit
def _forward(
    both_R2F: tl.tensor,
    act_RF: tl.tensor,
    used: tl.tensor,
    rows: int,
    width: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
) -> None:
    rows, tiles = tiles_of(rows, used, HEIGHT)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        single, double, exists = tile_of(tile, rows, width, HEIGHT=HEIGHT, COLUMNS=COLUMNS)
        gate = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        tl.store(act_RF + single, (up + 1.0) * gate * tl.sigmoid(ALPHA * gate), mask=exists)


@jit
def _backward(
    grad_RF: tl.tensor,
    both_R2F: tl.tensor,
    grad_both_R2F: tl.tensor,
    used: tl.tensor,
    rows: int,
    width: int,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
) -> None:
    rows, tiles = tiles_of(rows, used, HEIGHT)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        single, double, exists = tile_of(tile, rows, width, HEIGHT=HEIGHT, COLUMNS=COLUMNS)
        grad = tl.load(grad_RF + single, mask=exists, other=0.0).to(tl.float32)
        gate_in = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
        up_in = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
        gate = tl.minimum(gate_in, LIMIT)
        up = tl.minimum(tl.maximum(up_in, -LIMIT), LIMIT)
        passed = tl.sigmoid(ALPHA * gate)
        slope = passed * (1.0 + ALPHA * gate * (1.0 - passed))
        gate_grad = tl.where(gate_in <= LIMIT, grad * (up + 1.0) * slope, 0.0)
        up_grad = tl.where(tl.abs(up_in) <= LIMIT, grad * gate * passed, 0.0)
        tl.store(grad_both_R2F + double, gate_grad, mask=exists)
        tl.store(grad_both_R2F + double + width, up_grad, mask=exists)
