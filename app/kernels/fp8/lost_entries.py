"""Count of matrix entries that FP8 loses, if a flag on the device asks for it.

Otherwise programs return at once, so that a captured graph may hold the kernel and count in some
replays only. Counts are integers, so their order does not matter.

`counts_3`, int64: nonzero entries; those of them rounded to zero; entries beyond the dtype's
maximum, which were clipped.
"""

from __future__ import annotations

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, cdiv

VALUES = 4096  # read by a program at once: 16 bytes of bf16 per thread, twice
WARPS = 8
PROGRAMS = 4  # resident programs per multiprocessor


def count_lost(
    x_N: Tensor,
    data_N: Tensor,
    counts_3: Tensor,
    *,
    wanted: Tensor,
    scale: Tensor | None,
    largest: float,
) -> None:
    """Add a matrix's counts to `counts_3`, if `wanted` (int32 [1]) is not 0.

    `data`: the entries of `x` in FP8, uint8; both contiguous. `scale`, fp32 [1]: the factor that
    quantised them; None if it was their own amax, so that none is clipped.
    """
    programs = min(MULTIPROCESSORS * PROGRAMS, cdiv(x_N.numel(), VALUES))
    if programs:
        _count[(programs,)](
            x_N,
            data_N,
            counts_3,
            wanted,
            counts_3 if scale is None else scale,
            largest,
            x_N.numel(),
            SCALED=scale is not None,
            BLOCK=VALUES,
            num_warps=WARPS,
        )


@jit
def _count(
    x: tl.tensor,
    data: tl.tensor,
    counts: tl.tensor,
    wanted: tl.tensor,
    scale: tl.tensor,
    largest: float,
    numel: int,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    if tl.load(wanted) != 0:
        present = tl.zeros((BLOCK,), tl.int32)
        zeroed = tl.zeros((BLOCK,), tl.int32)
        beyond = tl.zeros((BLOCK,), tl.int32)
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            # a matrix may have more than 2³¹ entries
            place = (tl.zeros((1,), tl.int64) + block) * BLOCK + tl.arange(0, BLOCK)
            entry = tl.load(x + place, mask=place < numel, other=0.0).to(tl.float32)
            # mask the sign: -0 is zero as well
            code = tl.load(data + place, mask=place < numel, other=0).to(tl.int32) & 127
            present += (entry != 0.0).to(tl.int32)
            zeroed += ((entry != 0.0) & (code == 0)).to(tl.int32)
            if SCALED:
                beyond += (tl.abs(entry) * tl.load(scale) > largest).to(tl.int32)
        tl.atomic_add(counts, tl.sum(present.to(tl.int64), axis=0), sem="relaxed")
        tl.atomic_add(counts + 1, tl.sum(zeroed.to(tl.int64), axis=0), sem="relaxed")
        if SCALED:
            tl.atomic_add(counts + 2, tl.sum(beyond.to(tl.int64), axis=0), sem="relaxed")
