"""Barriers between GPUs with peer access: conditional on a value on the device, or part of another
kernel.

Each rank increments a counter of its own in every other rank's memory at each barrier, with release
semantics; waiting for the others' counters acquires what they have written before, on the same
stream.

Shapes: P ranks · S numbers that say whether to run the barrier, PLACES ≥ S, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Barrier counters: int64, on the device, all 0 before the first barrier."""

    own_P: Tensor  # written by other ranks; rank p writes entry p
    addresses_P: Tensor  # address of this rank's counter in each rank's memory
    passed_P: Tensor  # barriers passed, private to this rank


def meet_if(needed_S: Tensor, arrivals: Arrivals) -> None:
    """Run the barrier if any of the numbers (int64), which are equal on all ranks, is above 0."""
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
    """Wait for one rank, in one program, after all writes of its threads."""
    nth = tl.load(passed + other) + 1
    tl.debug_barrier()  # all threads have read it, and written their data
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
