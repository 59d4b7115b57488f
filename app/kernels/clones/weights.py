"""Copies of experts' weights to the slots of their clones, and of the clones' gradients back,
through addresses of symmetric memory, or of parts of a local tensor.

Sums are fp32 in order of slots, without atomics. Nothing here waits for other ranks: what is read
must have been written.

Shapes: R ranks · L experts of this rank, from `first` on · s slots of a rank, S = R·s of all: slot
j is number j % s on rank j // s · I × O a matrix. `expert_S` (int64) holds the expert of each slot,
`moved_S` (int64) the tokens that go there; a slot without tokens is empty. `addresses_R` (int64, on
the device): start of each rank's s matrices, aligned to 16 bytes. In kernels: BLOCK values of a
matrix at a time, PLACES ≥ S, a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import MULTIPROCESSORS, block_of, cdiv

BLOCK = 4096
WARPS = 8  # 16 values per thread: two accesses of 16 bytes in bf16, four in fp32
PROGRAMS = 2 * MULTIPROCESSORS  # per slot at most: one slot alone keeps its link busy


@dataclass(frozen=True, slots=True)
class Slots:
    """Source and destination of one kind of matrices."""

    weight_LIO: Tensor  # matrices of this rank's experts
    addresses_R: Tensor  # of each rank's slots for such matrices


def push_clones(up: Slots, down: Slots, expert_S: Tensor, moved_S: Tensor, first: int) -> None:
    """Write weight[e - first] of both kinds to every filled slot whose expert e this rank owns.

    Slots have the weights' dtype. Nothing is read or written for other slots.
    """
    weights = up.weight_LIO, down.weight_LIO
    assert all(weight.is_contiguous() for weight in weights)
    counts = [weight[0].numel() for weight in weights]
    slots, programs = _grid(max(counts), expert_S)
    _push[(slots, cdiv(programs, 2), 2)](
        up=up.weight_LIO,
        down=down.weight_LIO,
        experts=expert_S,
        moved=moved_S,
        up_addresses=up.addresses_R,
        down_addresses=down.addresses_R,
        spares=len(expert_S) // len(up.addresses_R),
        first=first,
        local=len(up.weight_LIO),
        up_count=counts[0],
        down_count=counts[1],
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def add_clones(
    total_LIO: Tensor, expert_S: Tensor, moved_S: Tensor, addresses_R: Tensor, first: int
) -> None:
    """Add to total[e - first] the fp32 matrices of all filled slots with expert e, in order of
    slots; in fp32, rounded once to the dtype of the total.

    Experts without a clone are neither read nor written. Equal calls give equal bits.
    """
    assert total_LIO.is_contiguous()
    count = total_LIO[0].numel()
    _add[_grid(count, expert_S)](
        totals=total_LIO,
        experts=expert_S,
        moved=moved_S,
        addresses=addresses_R,
        slots=len(expert_S),
        spares=len(expert_S) // len(addresses_R),
        first=first,
        local=len(total_LIO),
        count=count,
        PLACES=block_of(len(expert_S)),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def _grid(count: int, expert_S: Tensor) -> tuple[int, int]:
    """Return the grid; neighbouring programs have different slots, so that all links are in use."""
    return len(expert_S), min(PROGRAMS, cdiv(count, BLOCK))


@jit
def _push(
    up: tl.tensor,
    down: tl.tensor,
    experts: tl.tensor,
    moved: tl.tensor,
    up_addresses: tl.tensor,
    down_addresses: tl.tensor,
    spares: int,
    first: int,
    local: int,
    up_count: int,
    down_count: int,
    BLOCK: tl.constexpr,
) -> None:
    slot = tl.program_id(0)
    expert = tl.load(experts + slot)
    if (tl.load(moved + slot) > 0) & (expert >= first) & (expert < first + local):
        nth = expert - first
        if tl.program_id(2) == 0:
            _push_matrix(up, up_addresses, slot, nth, spares=spares, count=up_count, BLOCK=BLOCK)
        else:
            _push_matrix(
                down, down_addresses, slot, nth, spares=spares, count=down_count, BLOCK=BLOCK
            )


@jit
def _push_matrix(
    weights: tl.tensor,
    addresses: tl.tensor,
    slot: tl.tensor,
    nth: tl.tensor,
    spares: int,
    count: int,
    BLOCK: tl.constexpr,
) -> None:
    """Copy this program's part of the nth matrix to a slot."""
    out = tl.load(addresses + slot // spares).to(tl.pointer_type(weights.dtype.element_ty))
    out = tl.multiple_of(out, 16) + (slot % spares).to(tl.int64) * count
    weight = weights + nth * count
    for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(weight + place, mask=place < count)
        tl.store(out + place, value, mask=place < count)


@jit
def _add(
    totals: tl.tensor,
    experts: tl.tensor,
    moved: tl.tensor,
    addresses: tl.tensor,
    slots: int,
    spares: int,
    first: int,
    local: int,
    count: int,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    slot = tl.program_id(0)
    expert = tl.load(experts + slot)
    if (tl.load(moved + slot) > 0) & (expert >= first) & (expert < first + local):
        nth = tl.arange(0, PLACES)
        has_one = tl.load(moved + nth, mask=nth < slots, other=0) > 0
        same = has_one & (tl.load(experts + nth, mask=nth < slots, other=-1) == expert)
        if tl.min(tl.where(same, nth, slots)) == slot:  # the expert's first slot adds all
            total = totals + (expert - first) * count
            for start in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
                place = start + tl.arange(0, BLOCK)
                value = tl.load(total + place, mask=place < count).to(tl.float32)
                at = slot
                while at < slots:
                    grad = tl.load(addresses + at // spares).to(tl.pointer_type(tl.float32))
                    grad = tl.multiple_of(grad, 16) + (at % spares).to(tl.int64) * count
                    value += tl.load(grad + place, mask=place < count)
                    at = tl.min(tl.where(same & (nth > at), nth, slots))
                tl.store(total + place, value.to(totals.dtype.element_ty), mask=place < count)
