"""Causal convolution of every channel over the last W tokens, and its SiLU.

Shapes: B sequences, S tokens, F channels, J programs that have channel f. `number` is of each
token's document; taps do not reach into others. A backward program sums its tokens' gradients of
the taps, and another kernel sums the J results in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels.common import jit, tl
from app.kernels.partial_sums import summed
from app.kernels.tiling import CONVOLVED, cdiv

CHANNELS, WARPS = 64, 8  # of a program


def short_convolution(x_BSF: Tensor, taps_FW: Tensor, number_BS: Tensor | None) -> Tensor:
    """Return SiLU of Σ_w x[t − W + 1 + w] · taps[w], B × S × F, computed in fp32 and rounded once.

    fp32, bf16 or fp16; number: int64, or None for one document. Saves its inputs alone.
    """
    if number_BS is not None:
        number_BS = number_BS.contiguous()
    out: Tensor = _ShortConvolution.apply(x_BSF.contiguous(), taps_FW.contiguous(), number_BS)
    return out


class _ShortConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, taps_FW: Tensor, number_BS: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_BSF, taps_FW, number_BS)
        out_BSF = torch.empty_like(x_BSF)
        _launch(_forward, x_BSF, taps_FW, number_BS, out_BSF=out_BSF)
        return out_BSF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor, Tensor, None]:
        x_BSF, taps_FW, number_BS = ctx.saved_tensors
        batch, tokens, channels = x_BSF.shape
        width = taps_FW.shape[1]
        grad_sum_BSF = torch.empty_like(x_BSF, dtype=torch.float32)
        programs = batch * cdiv(tokens, CONVOLVED)
        partial = x_BSF.new_empty(programs, width * channels, dtype=torch.float32)
        _launch(_backward_sums, x_BSF, taps_FW, number_BS, grad_BSF=grad_BSF.contiguous(),
                grad_sum_BSF=grad_sum_BSF, partial_JWF=partial)  # fmt: skip
        grad_x_BSF = torch.empty_like(x_BSF)
        _launch(_backward_tokens, grad_sum_BSF, taps_FW, number_BS, grad_x_BSF=grad_x_BSF)
        grad_taps = summed(partial, taps_FW.dtype).view(width, channels).t()
        return grad_x_BSF, grad_taps.contiguous(), None


def _launch(
    kernel: Any, x_BSF: Tensor, taps_FW: Tensor, number_BS: Tensor | None, **others: Tensor
) -> None:
    """Launch over tiles of tokens of one sequence and of channels."""
    batch, tokens, channels = x_BSF.shape
    kernel[(batch * cdiv(tokens, CONVOLVED), cdiv(channels, CHANNELS))](
        x_BSF,
        taps_FW,
        number_BS,
        **others,
        tokens=tokens,
        channels=channels,
        WIDTH=taps_FW.shape[1],
        TOKENS=CONVOLVED,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )


@jit
def _tile(
    tokens: int, channels: int, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """Return the sequence's first row, the tokens in it, the channels, and which values exist."""
    tiles = tl.cdiv(tokens, TOKENS)
    # B·S·F may exceed 32 bits
    first = (tl.program_id(0) // tiles).to(tl.int64) * tokens
    token = (tl.program_id(0) % tiles) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return first, token, channel, (token < tokens) & (channel < channels)


@jit
def _at(
    x_BSF: tl.tensor,
    number_BS: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    exists: tl.tensor,
    tokens: int,
    channels: int,
    away: tl.constexpr,
) -> tl.tensor:
    """Return in fp32 the values `away` tokens later; 0 where these are of another document."""
    other = token + away
    exists = exists & (other >= 0) & (other < tokens)
    if number_BS is not None and away != 0:
        here = tl.load(number_BS + first + token, mask=token < tokens, other=-1)
        there = (other >= 0) & (other < tokens)
        exists = exists & (here == tl.load(number_BS + first + other, mask=there, other=-2))
    return tl.load(x_BSF + (first + other) * channels + channel, mask=exists, other=0.0).to(
        tl.float32
    )


@jit
def _tap(
    taps_FW: tl.tensor, channel: tl.tensor, channels: int, WIDTH: tl.constexpr, back: tl.constexpr
) -> tl.tensor:
    place = channel * WIDTH + (WIDTH - 1 - back)
    return tl.load(taps_FW + place, mask=channel < channels, other=0.0).to(tl.float32)


@jit
def _forward(
    x_BSF: tl.tensor,
    taps_FW: tl.tensor,
    number_BS: tl.tensor,
    out_BSF: tl.tensor,
    tokens: int,
    channels: int,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    first, token, channel, exists = _tile(tokens, channels, TOKENS, CHANNELS=CHANNELS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for back in tl.static_range(WIDTH):
        x = _at(x_BSF, number_BS, first, token=token, channel=channel, exists=exists, tokens=tokens,
                channels=channels, away=-back)  # fmt: skip
        total += x * _tap(taps_FW, channel, channels, WIDTH=WIDTH, back=back)
    place = (first + token) * channels + channel
    tl.store(out_BSF + place, total * tl.sigmoid(total), mask=exists)


@jit
def _backward_sums(
    x_BSF: tl.tensor,
    taps_FW: tl.tensor,
    number_BS: tl.tensor,
    grad_BSF: tl.tensor,
    grad_sum_BSF: tl.tensor,
    partial_JWF: tl.tensor,
    tokens: int,
    channels: int,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Gradients of the sums before SiLU, and of the taps by these tokens."""
    first, token, channel, exists = _tile(tokens, channels, TOKENS, CHANNELS=CHANNELS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for back in tl.static_range(WIDTH):
        x = _at(x_BSF, number_BS, first, token=token, channel=channel, exists=exists, tokens=tokens,
                channels=channels, away=-back)  # fmt: skip
        total += x * _tap(taps_FW, channel, channels, WIDTH=WIDTH, back=back)
    place = (first + token) * channels + channel
    passed = tl.sigmoid(total)
    grad = tl.load(grad_BSF + place, mask=exists, other=0.0).to(tl.float32)
    grad *= passed * (1.0 + total * (1.0 - passed))
    tl.store(grad_sum_BSF + place, grad, mask=exists)
    row = partial_JWF + tl.program_id(0).to(tl.int64) * WIDTH * channels
    for back in tl.static_range(WIDTH):
        x = _at(x_BSF, number_BS, first, token=token, channel=channel, exists=exists, tokens=tokens,
                channels=channels, away=-back)  # fmt: skip
        tap = row + (WIDTH - 1 - back) * channels + channel
        tl.store(tap, tl.sum(grad * x, 0)[None, :], mask=channel < channels)


@jit
def _backward_tokens(
    grad_sum_BSF: tl.tensor,
    taps_FW: tl.tensor,
    number_BS: tl.tensor,
    grad_x_BSF: tl.tensor,
    tokens: int,
    channels: int,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Gradients of the inputs, each of which later tokens have taken."""
    first, token, channel, exists = _tile(tokens, channels, TOKENS, CHANNELS=CHANNELS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for back in tl.static_range(WIDTH):
        grad = _at(grad_sum_BSF, number_BS, first, token=token, channel=channel, exists=exists,
                   tokens=tokens, channels=channels, away=back)  # fmt: skip
        total += grad * _tap(taps_FW, channel, channels, WIDTH=WIDTH, back=back)
    tl.store(grad_x_BSF + (first + token) * channels + channel, total, mask=exists)
