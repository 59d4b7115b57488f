"""Device functions that fill the slots of one clone plan, by each algorithm of
`app.moe.echo.plan_clones`. Each runs in one program with all its threads: integers, sums in any
order, no atomics.

Instead of sorting, each element is compared with all others: the sum over everything before it
replaces its place in the sorted order. Vectors compared with themselves go through memory, behind a
barrier, and are read one element at a time; of spills only the few that are not empty.

Shapes: R ranks · E experts, L of each rank · S slots. R, E and S are powers of two that hold these.
"""

from __future__ import annotations

from app.kernels.common import jit, tl

PRIORITIES = 8  # priority classes of `approx_bin_packing`


def scratch_of(ranks: int, experts: int) -> int:
    """Return the number of integers that `spread_spills` needs: loads and spills of experts, then
    per rank expert and tokens of the largest spills, rank and tokens of the largest rooms.
    """
    return 2 * experts + 4 * ranks


@jit
def fill_to_target(
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    left: tl.tensor,
    rank_load: tl.tensor,
    target: tl.tensor,
    way: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    spares: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Fill slots up to the target; bits of `way` say whether givers pass on, and whether the
    smallest expert that fits is taken.
    """
    rank, expert, slot = tl.arange(0, R), tl.arange(0, E), tl.arange(0, S)
    free = tl.where(rank < ranks, spares, 0)
    experts_of_slots = tl.zeros((S,), tl.int32)
    tokens_of_slots = tl.zeros((S,), tl.int64)
    moved = tl.max(rank_load, axis=0)
    while moved > 0:
        room = tl.where(free > 0, tl.maximum(target - rank_load, 0), 0)
        over = tl.maximum(rank_load - target, 0)
        most_room, most_over = tl.max(room, axis=0), tl.max(over, axis=0)
        host = tl.min(tl.where(room == most_room, rank, R), axis=0)
        giver = tl.min(tl.where(over == most_over, rank, R), axis=0)
        passes_on = (way % 2 == 1) & (tl.sum(over, axis=0) > most_over)
        wanted = tl.where(passes_on, most_room, tl.minimum(most_room, most_over))
        mine = (expert // (experts // ranks) == giver) & (expert < experts)
        own = tl.where(mine, left, -1)
        # 2⁶² is larger than any count
        order = tl.where((way >= 2) & (own >= wanted), 2**62 - own, own)
        first = tl.max(order, axis=0)
        best = tl.min(tl.where(order == first, expert, E), axis=0)
        moved = tl.minimum(wanted, tl.where(first > 2**61, 2**62 - first, first))
        left -= tl.where(expert == best, moved, 0)
        place = host * spares + spares - tl.sum(tl.where(rank == host, free, 0), axis=0)
        taken = (slot == place) & (moved > 0)
        experts_of_slots = tl.where(taken, best, experts_of_slots)
        tokens_of_slots = tl.where(taken, moved, tokens_of_slots)
        rank_load += tl.where(rank == host, moved, 0) - tl.where(rank == giver, moved, 0)
        free -= ((rank == host) & (moved > 0)).to(tl.int32)
    tl.store(slot_experts + slot, experts_of_slots, mask=slot < ranks * spares)
    tl.store(slot_tokens + slot, tokens_of_slots, mask=slot < ranks * spares)


@jit
def spread_spills(
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    scratch: tl.tensor,
    load: tl.tensor,
    room: tl.tensor,
    average: tl.tensor,
    packs: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    spares: tl.constexpr,
    PRIORITIES: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
) -> None:
    """Fill slots by `approx_bin_packing` if `packs`, otherwise by `one_shot_greedy`, with a scratch
    of `scratch_of` integers.
    """
    expert = tl.arange(0, E)
    tl.store(scratch + expert, load, mask=expert < experts)
    tl.debug_barrier()
    spills = scratch + experts
    spill = _spilled(scratch, load, average, experts=experts, local=experts // ranks, E=E)
    filled = (spill > 0).to(tl.int32)  # usually few
    nth, count = tl.cumsum(filled, axis=0) - 1, tl.sum(filled, axis=0)
    tl.store(spills + nth, spill, mask=spill > 0)
    tl.debug_barrier()
    if packs:
        _pack_slots(
            slot_experts,
            slot_tokens,
            spills + experts,
            spill,
            _spills_before(spills, spill, nth, count=count, COUNTS=True),
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
            _spills_before(spills, spill, nth, count=count, COUNTS=False),
            room,
            ranks=ranks,
            spares=spares,
            R=R,
            E=E,
        )


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
