"""A barrier between GPUs that reach each other's memory, which only the device knows the need of.

What others have to read is marked by kernels before it, on the same stream: a number for each rank
grows by one with every meeting, in the memory of every other rank. It is written behind all that
this rank has written before, and what others have written before theirs can be read behind it.

Shapes: P ranks · S numbers that say whether ranks meet, PLACES ≥ S, a power of two.
"""

from __future__ import annotations

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of


def meet_if(needed_S: Tensor, arrived_P: Tensor, addresses_P: Tensor, passed_P: Tensor) -> None:
    """Wait for all ranks if any of the numbers, which are equal on all of them, is above 0.

    All int64, on the device: `arrived_P` is in memory that others write, rank p its own number;
    `addresses_P` is where this rank's number lies with each rank; `passed_P` is this rank's alone.
    All are 0 before the first call.
    """
    _meet[(len(arrived_P),)](
        needed_S,
        arrived_P,
        addresses_P,
        passed_P,
        numbers=len(needed_S),
        PLACES=block_of(len(needed_S)),
        num_warps=1,
    )


@jit
def _meet(
    needed: tl.tensor,
    arrived: tl.tensor,
    addresses: tl.tensor,
    passed: tl.tensor,
    numbers: int,
    PLACES: tl.constexpr,
) -> None:
    place = tl.arange(0, PLACES)
    if tl.max(tl.load(needed + place, mask=place < numbers, other=0), axis=0) > 0:
        other = tl.program_id(0)
        nth = tl.load(passed + other) + 1
        tl.store(passed + other, nth)
        told = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(told, nth, sem="release", scope="sys")
        while tl.atomic_add(arrived + other, 0, sem="acquire", scope="sys") < nth:
            pass
