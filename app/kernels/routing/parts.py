"""Split of fp32 matrices into three bf16 parts, which tensor cores multiply without losing a digit:
8 + 8 + 8 bits are the 24 of fp32 (Henry, Tang, Heinecke 2019, arXiv 1904.06376).

Shapes: T rows of width E.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl, usable
from app.kernels.tiling import PARTS, cdiv

BLOCK = 2048  # values per program, 16 per thread


def in_parts(wide_TE: Tensor) -> Tensor:
    """Return fp32 [T, E] as bf16 [T, 3·E]: in each row the first parts, then the second, then the
    third.

    They sum to `wide_TE`, except below the smallest or beyond the largest numbers of bf16.
    """
    if not usable(wide_TE):
        first = wide_TE.bfloat16()
        rest = wide_TE - first
        second = rest.bfloat16()
        return torch.cat((first, second, (rest - second).bfloat16()), dim=1)
    rows, width = wide_TE.shape
    parts = torch.empty(rows, PARTS * width, dtype=torch.bfloat16, device=wide_TE.device)
    split = (cdiv(wide_TE.numel(), BLOCK),)
    _split[split](
        wide_TE.contiguous(), parts, wide_TE.numel(), width=width, PARTS=PARTS, BLOCK=BLOCK
    )
    return parts


@jit
def _split(
    wide: tl.tensor,
    parts: tl.tensor,
    count: int,
    width: int,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = place < count
    x = tl.load(wide + place, mask=real, other=0.0)
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    to = parts + place // width * PARTS * width + place % width
    tl.store(to, first, mask=real)
    tl.store(to + width, second, mask=real)
    tl.store(to + 2 * width, third, mask=real)
