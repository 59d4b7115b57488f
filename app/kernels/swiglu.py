"""SwiGLU activation silu(gate) · up (Shazeer 2020): one pass per direction.

Shapes: R rows, F hidden width of the feed-forward; the gate is the first half of a row of `both`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, block_of, cdiv

TILE = 2048  # values of the result per program, 16 per thread
COLUMNS = 512  # at most, per tile
PROGRAMS = 16  # resident programs per multiprocessor


def swiglu(both: Tensor, used: Tensor | None = None) -> Tensor:
    """Map [..., 2F] -> [..., F], computed in fp32 and rounded once; saves only `both` for backward.

    fp32, bf16 or fp16. `used`, one int32 on the device, is the number of valid rows: later ones are
    neither read nor written, in backward either.
    """
    act: Tensor = _Swiglu.apply(both.contiguous(), used)
    return act


def geglu(both: Tensor) -> Tensor:
    """Map [..., 2F] -> [..., F] by gelu(gate) · up with the tanh approximation, as `swiglu`."""
    act: Tensor = _Geglu.apply(both.contiguous())
    return act


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, used: Tensor | None) -> Tensor:
        ctx.save_for_backward(both, used)
        act = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        launch(_forward, act, used, both, act, GELU=False)
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        both, used = ctx.saved_tensors
        grad_both = torch.empty_like(both)
        launch(_backward, grad, used, grad.contiguous(), both, grad_both, GELU=False)
        return grad_both, None


class _Geglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        act = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
        launch(_forward, act, None, both, act, GELU=True)
        return act

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        grad_both = torch.empty_like(both)
        launch(_backward, grad, None, grad.contiguous(), both, grad_both, GELU=True)
        return grad_both


def launch(
    kernel: Any, act: Tensor, used: Tensor | None, *tensors: Tensor, **constants: float
) -> None:
    """Launch over tiles of the result's shape; if only the device knows their number, a resident
    set of programs loops over them. `constants` are those of other activations.
    """
    width = act.shape[-1]
    rows = act.numel() // max(1, width)
    columns = min(block_of(width), COLUMNS)
    height = TILE // columns
    down, across = cdiv(rows, height), cdiv(width, columns)
    if used is not None:
        down = min(down, cdiv(MULTIPROCESSORS * PROGRAMS, across))
    kernel[(down, across)](*tensors, used, rows, width, HEIGHT=height, COLUMNS=columns, **constants)


@jit
def tiles_of(rows: int, used: tl.tensor, HEIGHT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the number of valid rows, and of row tiles that contain any."""
    if used is not None:
        rows = tl.minimum(rows, tl.load(used))
    return rows, tl.cdiv(rows, HEIGHT)


@jit
def tile_of(
    tile: int, rows: int, width: int, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return offsets of a tile's values in [R, F] and [R, 2F], and which of them exist."""
    # R·2F may exceed 32 bits
    row = (tile * HEIGHT + tl.arange(0, HEIGHT)[:, None]).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row * width + column, row * (2 * width) + column, (row < rows) & (column < width)


@jit
def _inner(gate: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return i(gate) and its derivative, with GELU by tanh as gate · sigmoid(i(gate)).

    As (1 + tanh(u)) / 2 = sigmoid(2u), i is 2 · √(2 / π) · (gate + 0.044715 · gate³).
    """
    square = gate * gate
    inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * square)
    return inner, 1.5957691216057308 * (1.0 + 3 * 0.044715 * square)


@jit
def _forward(
    both_R2F: tl.tensor,
    act_RF: tl.tensor,
    used: tl.tensor,
    rows: int,
    width: int,
    GELU: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows, tiles = tiles_of(rows, used, HEIGHT)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        single, double, exists = tile_of(tile, rows, width, HEIGHT=HEIGHT, COLUMNS=COLUMNS)
        gate = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
        if GELU:
            inner, _ = _inner(gate)
            tl.store(act_RF + single, gate * tl.sigmoid(inner) * up, mask=exists)
        else:
            tl.store(act_RF + single, gate * tl.sigmoid(gate) * up, mask=exists)


@jit
def _backward(
    grad_RF: tl.tensor,
    both_R2F: tl.tensor,
    grad_both_R2F: tl.tensor,
    used: tl.tensor,
    rows: int,
    width: int,
    GELU: tl.constexpr,
    HEIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    rows, tiles = tiles_of(rows, used, HEIGHT)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        single, double, exists = tile_of(tile, rows, width, HEIGHT=HEIGHT, COLUMNS=COLUMNS)
        grad = tl.load(grad_RF + single, mask=exists, other=0.0).to(tl.float32)
        gate = tl.load(both_R2F + double, mask=exists, other=0.0).to(tl.float32)
        up = tl.load(both_R2F + double + width, mask=exists, other=0.0).to(tl.float32)
        if GELU:
            inner, growth = _inner(gate)
            passed = tl.sigmoid(inner)
            slope = passed * (1.0 + gate * (1.0 - passed) * growth)
        else:
            passed = tl.sigmoid(gate)
            slope = passed * (1.0 + gate * (1.0 - passed))
        tl.store(grad_both_R2F + double, grad * up * slope, mask=exists)
        tl.store(grad_both_R2F + double + width, grad * gate * passed, mask=exists)
