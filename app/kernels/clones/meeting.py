"""Barriers between GPUs that reach each other's memory, of which only the device knows the need or
that are part of another kernel.

What others are to read has been written before, on the same stream: a number for each rank
grows by one with every meeting, in the memory of every other rank. It is written behind all that
this rank has written before, and what others have written before theirs can be read behind it.

Shapes: P ranks · S numbers that say whether ranks meet, PLACES ≥ S, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How often ranks have met: int64, on the device, all 0 before the first meeting."""

    own_P: Tensor  # in memory that others write, rank p its own number
    addresses_P: Tensor  # of this rank's number with each rank
    passed_P: Tensor  # this rank's alone


def meet_if(needed_S: Tensor, arrivals: Arrivals) -> None:
    """Wait for all ranks if any of the numbers (int64), which are equal on all of them, is above
    0.
    """
    _meet[(len(arrivals.own_P),)](
        needed_S,
        arrivals.own_P,
        arrivals.addresses_P,
        arrivals.passed_P,
        numbers=len(needed_S),
        PLACES=block_of(len(needed_S)),
        num_warps=1,
    )


@jit
def meet_one(other: tl.tensor, arrived: tl.tensor, addresses: tl.tensor, passed: tl.tensor) -> None:
    """Wait for one rank, in one program, behind all that its threads have written."""
    nth = tl.load(passed + other) + 1
    tl.debug_barrier()  # all threads have read it, and written what they had to
    tl.store(passed + other, nth)
    told = tl.load(addresses + other).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(told, nth, sem="release", scope="sys")
    while tl.atomic_add(arrived + other, 0, sem="acquire", scope="sys") < nth:
        pass


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
        meet_one(tl.program_id(0), arrived, addresses, passed)
