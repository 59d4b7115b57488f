"""Dropout whose mask is a hash of a token's and a channel's key: it is stored nowhere, and the same
wherever it is made again.

Shapes: B sequences, s tokens, I channels; keys are int32.
"""

from __future__ import annotations

from torch import Tensor

from app.kernels.common import jit, tl, usable
from app.kernels.tiling import cdiv

BITS = 32
# multipliers of a 32-bit mixing function with little bias: github.com/skeeto/hash-prospector
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - 2**BITS
ROWS, COLUMNS = 8, 512  # tile of a program


def mixed(key: Tensor) -> Tensor:
    """Return a hash of every int32 value, in place."""
    for shift, factor in ((16, FIRST), (15, SECOND), (16, 1)):
        # without the copies of the sign
        key ^= (key >> shift).bitwise_and_((1 << (BITS - shift)) - 1)
        if factor != 1:
            key *= factor
    return key


def most_of(keep: float) -> int:
    """Return the bound that a share `keep` of all hashes is below."""
    half = 1 << (BITS - 1)
    return min(round(keep * 2 * half) - half, half - 1)


def dropped(x_BsI: Tensor, keys_Bs: Tensor, channels_I: Tensor, most: int) -> Tensor:
    """Return x with zeros where the hash is not below `most`; the rest is not scaled."""
    if not usable(x_BsI):
        return x_BsI.masked_fill(mixed(keys_Bs[..., None] ^ channels_I) >= most, 0)
    x_BsI = x_BsI.contiguous()
    out_BsI = x_BsI.new_empty(x_BsI.shape)
    sequences, tokens, width = x_BsI.shape
    grid = cdiv(sequences * tokens, ROWS), cdiv(width, COLUMNS)
    _drop[grid](
        x_BsI,
        keys_Bs,
        channels_I,
        out_BsI,
        sequences * tokens,
        tokens,
        width,
        keys_Bs.stride(0),
        most,
        FIRST=FIRST,
        SECOND=SECOND,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return out_BsI


@jit
def _drop(
    x_TI: tl.tensor,
    keys_BS: tl.tensor,
    channels_I: tl.tensor,
    out_TI: tl.tensor,
    count: int,
    tokens: int,
    width: int,
    stride: int,
    most: int,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_row = tl.load(keys_BS + row // tokens * stride + row % tokens, mask=row < count, other=0)
    of_column = tl.load(channels_I + column, mask=column < width, other=0)
    key = of_row[:, None] ^ of_column[None, :]
    key = (key ^ ((key >> 16) & 0xFFFF)) * FIRST
    key = (key ^ ((key >> 15) & 0x1FFFF)) * SECOND
    key = key ^ ((key >> 16) & 0xFFFF)
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    exists = (row < count)[:, None] & (column < width)[None, :]
    value = tl.load(x_TI + place, mask=exists & (key < most), other=0.0)
    tl.store(out_TI + place, value, mask=exists)
