"""Device functions of clone planning: the simpler algorithms of `app.moe.echo.plan_clones`, and the
output of a plan. Each runs in one program with all its threads.

Shapes: R ranks · E experts, L of each rank · S slots. R, E and S are powers of two that hold these.
"""

from __future__ import annotations

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of

PRIORITIES = 8  # priority classes of `approx_bin_packing`
SOURCES = 4096  # (rank, slot, slot) triples processed together


def sources_at_once(ranks: int, slots: int) -> int:
    """Return the number of ranks whose share of all slots is computed at once."""
    return min(block_of(ranks), max(1, SOURCES // block_of(slots) ** 2))


def scratch_of(ranks: int, experts: int) -> int:
    """Return the number of integers that `spread_spills` needs: loads and spills of experts, then
    per rank expert and tokens of the largest spills, rank and tokens of the largest rooms.
    """
    return 2 * experts + 4 * ranks


@jit
def _spilled(
    loads: tl.tensor,
    load: tl.tensor,
    average: tl.tensor,
    experts: tl.constexpr,
    local: tl.constexpr,
    E: tl.constexpr,
) -> tl.tensor:
    """Return the tokens of each expert beyond the average of its rank, smallest experts first:
    [E].
    """
    expert = tl.arange(0, E)
    start = tl.zeros((E,), tl.int64)
    for place in range(local):
        other = expert // local * local + place
        load_there = tl.load(loads + other, mask=expert < experts, other=0)
        earlier = (load_there < load) | ((load_there == load) & (other < expert))
        start += tl.where(earlier, load_there, 0)
    return tl.maximum(start + load - average, 0) - tl.maximum(start - average, 0)


@jit
def _spills_before(
    spills: tl.tensor, spill: tl.tensor, nth: tl.tensor, count: tl.tensor, COUNTS: tl.constexpr
) -> tl.tensor:
    """Return the sum of the spills sorted before each, largest first, or with COUNTS their number;
    `nth` and `count` index the spills that are not 0.
    """
    before = tl.zeros_like(nth if COUNTS else spill)
    for other in range(count):
        spill_there = tl.load(spills + other)
        earlier = (spill_there > spill) | ((spill_there == spill) & (other < nth))
        before += tl.where(earlier, 1 if COUNTS else spill_there, 0)
    return before


@jit
def _rooms_before(room: tl.tensor, R: tl.constexpr) -> tl.tensor:
    """Return whether the room of one rank, [:, None], sorts before that of another: [R, R]."""
    rank = tl.arange(0, R)
    larger = room[:, None] > room[None, :]
    return larger | ((room[:, None] == room[None, :]) & (rank[:, None] < rank[None, :]))


@jit
def _overlap_slots(
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    spill: tl.tensor,
    spill_start: tl.tensor,
    room: tl.tensor,
    ranks: tl.constexpr,
    spares: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Fill slots by `one_shot_greedy`."""
    rank = tl.arange(0, R)
    expert = tl.arange(0, E)[None, :].to(tl.int64)
    room_start = tl.sum(tl.where(_rooms_before(room, R=R), room[:, None], 0), axis=0)
    end = tl.minimum((spill_start + spill)[None, :], (room_start + room)[:, None])
    overlap = tl.maximum(end - tl.maximum(spill_start[None, :], room_start[:, None]), 0)
    for nth in range(spares):
        most = tl.max(overlap, axis=1)
        # of spills that are not empty no two start at the same place
        largest = (overlap == most[:, None]) & (overlap > 0)
        first = tl.min(tl.where(largest, spill_start[None, :], 2**62), axis=1)
        taken = largest & (spill_start[None, :] == first[:, None])
        place = rank * spares + nth
        supplier = tl.sum(tl.where(taken, expert, 0), axis=1)
        tl.store(slot_experts + place, supplier, mask=rank < ranks)
        tl.store(slot_tokens + place, most, mask=rank < ranks)
        overlap = tl.where(taken, 0, overlap)


@jit
def _pack_slots(
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    queue: tl.tensor,
    spill: tl.tensor,
    turn: tl.tensor,
    count: tl.tensor,
    room: tl.tensor,
    average: tl.tensor,
    ranks: tl.constexpr,
    PRIORITIES: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Fill slots by `approx_bin_packing`.

    Only the R largest of `count` spills matter: untouched spills are taken in that order, and a
    spill that has given tokens moves back in the queue, so each of R steps takes one of these. Once
    nothing is left it does not matter which is taken.
    """
    nth = tl.arange(0, R)
    room_nth = tl.sum(_rooms_before(room, R=R).to(tl.int32), axis=0)
    first = (turn < ranks) & (spill > 0)
    tl.store(queue + turn, tl.arange(0, E), mask=first)
    tl.store(queue + ranks + turn, spill, mask=first)
    tl.store(queue + 2 * ranks + room_nth, nth, mask=nth < ranks)
    tl.store(queue + 3 * ranks + room_nth, room, mask=nth < ranks)
    tl.debug_barrier()
    queued = nth < tl.minimum(count, ranks)
    supplier = tl.load(queue + nth, mask=queued, other=0)
    left = tl.load(queue + ranks + nth, mask=queued, other=0)
    step = tl.maximum(average // (PRIORITIES - 1), 1)
    turn = nth
    for place in range(ranks):
        at = queue + 2 * ranks + tl.full((R,), place, tl.int32)
        slot, room_here = tl.load(at), tl.load(at + ranks)
        priority = (left < average).to(tl.int32)
        for below in tl.static_range(1, PRIORITIES - 1):  # comparisons are faster than a division
            priority += (average - left >= below * step).to(tl.int32)
        key = tl.where(left > 0, priority, PRIORITIES) * (2 * R) + turn
        taken = key == tl.min(key, axis=0)  # exactly one, as turns are unique
        moved = tl.minimum(left, room_here)
        tl.store(slot_experts + slot, supplier, mask=taken)
        tl.store(slot_tokens + slot, moved, mask=taken)
        left = tl.where(taken, left - moved, left)
        turn = tl.where(taken, R + place, turn)


@jit
def spread_spills(
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    scratch: tl.tensor,
    load: tl.tensor,
    room: tl.tensor,
    average: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    spares: tl.constexpr,
    PACKS: tl.constexpr,
    PRIORITIES: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Fill slots by `approx_bin_packing` if PACKS, otherwise by `one_shot_greedy`. All threads must
    be able to read the load at `scratch`, of `scratch_of` integers.
    """
    local: tl.constexpr = experts // ranks
    spills = scratch + experts
    spill = _spilled(scratch, load, average, experts=experts, local=local, E=E)
    filled = (spill > 0).to(tl.int32)  # usually few
    nth, count = tl.cumsum(filled, axis=0) - 1, tl.sum(filled, axis=0)
    tl.store(spills + nth, spill, mask=spill > 0)
    tl.debug_barrier()
    before = _spills_before(spills, spill, nth, count=count, COUNTS=PACKS)
    if PACKS:
        _pack_slots(
            slot_experts,
            slot_tokens,
            spills + experts,
            spill,
            before,
            count,
            room,
            average,
            ranks=ranks,
            PRIORITIES=PRIORITIES,
            R=R,
            E=E,
        )
    else:
        _overlap_slots(
            slot_experts,
            slot_tokens,
            spill,
            before,
            room,
            ranks=ranks,
            spares=spares,
            R=R,
            E=E,
        )


@jit
def write_plan(
    counts: tl.tensor,
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    moved_of_rank: tl.tensor,
    sums: tl.tensor,
    supplier: tl.tensor,
    moved: tl.tensor,
    rank_load: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    slots: tl.constexpr,
    SOURCES: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Write the plan by slot, and by source rank and slot, SOURCES ranks at once. Adds loads to
    `sums` if given.
    """
    slot = tl.arange(0, S)
    tl.store(slot_experts + slot, supplier, mask=slot < slots)
    tl.store(slot_tokens + slot, moved, mask=slot < slots)
    if sums is not None:
        _add_loads(
            sums, supplier, moved, rank_load, ranks=ranks, experts=experts, slots=slots, R=R, S=S
        )
    if tl.max(moved, axis=0) > 0:
        _sources(
            counts,
            moved_of_rank,
            supplier,
            moved,
            ranks=ranks,
            experts=experts,
            slots=slots,
            SOURCES=SOURCES,
            R=R,
            S=S,
        )
    else:
        place = tl.arange(0, R)[:, None] * slots + slot[None, :]
        inside = (tl.arange(0, R) < ranks)[:, None] & (slot < slots)[None, :]
        tl.store(moved_of_rank + place, tl.zeros((R, S), tl.int64), mask=inside)


@jit
def _add_loads(
    sums: tl.tensor,
    supplier: tl.tensor,
    moved: tl.tensor,
    before: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    slots: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Add tokens of the fullest rank before and after, of all ranks, and filled slots."""
    nth = tl.arange(0, 4)
    sums += nth
    until_now = tl.load(sums)
    rank, slot = tl.arange(0, R)[:, None], tl.arange(0, S)
    local: tl.constexpr = experts // ranks
    given = tl.sum(tl.where(rank == (supplier // local)[None, :], moved[None, :], 0), axis=1)
    host = slot // (slots // ranks)
    got = tl.sum(tl.where(rank == host[None, :], moved[None, :], 0), axis=1)
    after = tl.max(before - given + got, axis=0)
    filled = tl.sum((moved > 0).to(tl.int32), axis=0)
    loads = tl.where(nth == 0, tl.max(before, axis=0), tl.where(nth == 1, after, 0))
    added = tl.where(nth == 2, tl.sum(before, axis=0), tl.where(nth == 3, filled, loads))
    tl.store(sums, until_now + added)


@jit
def _sources(
    counts: tl.tensor,
    moved_of_rank: tl.tensor,
    supplier: tl.tensor,
    moved: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    slots: tl.constexpr,
    SOURCES: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Return the tokens each rank gives to each slot, SOURCES ranks at once: in proportion, then
    from the first ranks on.
    """
    rank = tl.arange(0, R)[:, None]
    slot = tl.arange(0, S)
    of_supplier = counts + rank * experts + supplier[None, :]
    count = tl.load(of_supplier, mask=(rank < ranks) & (slot < slots)[None, :], other=0)
    total = tl.maximum(tl.sum(count, axis=0), 1)
    missing = moved - tl.sum(count * moved[None, :] // total[None, :], axis=0)
    same = supplier[:, None] == supplier[None, :]
    earlier = same & (slot[:, None] < slot[None, :])
    missing_start = tl.sum(tl.where(earlier, missing[:, None], 0), axis=0)
    before = tl.zeros((S,), tl.int64)
    for first in range(0, ranks, SOURCES):
        source = first + tl.arange(0, SOURCES)[:, None]
        inside = (source < ranks) & (slot < slots)[None, :]
        own = tl.load(counts + source * experts + supplier[None, :], mask=inside, other=0)
        share = own * moved[None, :] // total[None, :]
        given = tl.sum(tl.where(same[None, :, :], share[:, :, None], 0), axis=1)
        left = own - given
        end = before[None, :] + tl.cumsum(left, axis=0)
        begin = tl.maximum(end - left, missing_start[None, :])
        more = tl.maximum(tl.minimum(end, (missing_start + missing)[None, :]) - begin, 0)
        tl.store(moved_of_rank + source * slots + slot[None, :], share + more, mask=inside)
        before += tl.sum(left, axis=0)
