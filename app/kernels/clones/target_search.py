"""Clone plan `target_search` in two launches: one program per candidate, then one that writes the
plan of the best. `app.moe.target_search` lists the candidates, in this order.

Shapes: R ranks · E experts, L of each rank · S slots · C candidates. In kernels R, E, LOCAL, S and
C are powers of two that hold these.
"""

from __future__ import annotations

from torch import Tensor

from app.kernels.clones.slots import (
    PRIORITIES,
    scratch_of,
    sources_at_once,
    spread_spills,
    write_plan,
)
from app.kernels.common import jit, tl
from app.kernels.tiling import block_of

TARGETS = 32  # the average plus a clone's price, then from the average to the largest load
WAYS = 4  # rules of choosing what moves, per target
FIRST = 2**62  # larger than any count
WARPS = 4  # per candidate
LAST_WARPS = 2  # of the program that writes the best plan


def search_clones(
    counts_RE: Tensor, spares: int, threshold: float, sums_4: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `app.kernels.clones.plan.plan_clones` returns, by `target_search`."""
    ranks, experts = counts_RE.shape
    slots, filled = ranks * spares, WAYS * TARGETS
    candidates = filled + (2 if spares == 1 else 1)
    counts_RE = counts_RE.contiguous()
    costs_C = counts_RE.new_empty(candidates)
    expert_CS, moved_CS = counts_RE.new_empty(2, candidates, slots).unbind()
    padded = block_of(experts)
    _try[(candidates,)](
        counts_RE,
        counts_RE.new_empty(candidates - filled, scratch_of(ranks, experts)),
        expert_CS,
        moved_CS,
        costs_C,
        float(threshold),
        ranks=ranks,
        experts=experts,
        spares=spares,
        TARGETS=TARGETS,
        FILLED=filled,
        FIRST=FIRST,
        SCRATCH=scratch_of(ranks, experts),
        PRIORITIES=PRIORITIES,
        R=block_of(ranks),
        E=padded,
        S=block_of(slots),
        num_warps=WARPS,
    )
    expert_S, moved_S = counts_RE.new_empty(2, slots).unbind()
    moved_RS = counts_RE.new_empty(ranks, slots)
    _take_best[(1,)](
        counts_RE,
        expert_CS,
        moved_CS,
        costs_C,
        expert_S,
        moved_S,
        moved_RS,
        sums_4,
        float(threshold),
        candidates=candidates,
        ranks=ranks,
        experts=experts,
        slots=slots,
        FIRST=FIRST,
        SOURCES=sources_at_once(ranks, slots),
        C=block_of(candidates),
        R=block_of(ranks),
        E=padded,
        S=block_of(slots),
        num_warps=LAST_WARPS,
    )
    return expert_S, moved_S, moved_RS


@jit
def _try(
    counts: tl.tensor,
    scratch: tl.tensor,
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    costs: tl.tensor,
    threshold: float,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    spares: tl.constexpr,
    TARGETS: tl.constexpr,
    FILLED: tl.constexpr,
    FIRST: tl.constexpr,
    SCRATCH: tl.constexpr,
    PRIORITIES: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
) -> None:
    local: tl.constexpr = experts // ranks
    slots: tl.constexpr = ranks * spares
    candidate = tl.program_id(0)
    rank, expert, slot = tl.arange(0, R), tl.arange(0, E), tl.arange(0, S)
    at = rank[:, None] * experts + expert[None, :]
    there = (rank < ranks)[:, None] & (expert < experts)[None, :]
    load = tl.sum(tl.load(counts + at, mask=there, other=0), axis=0)
    at_owner = rank[:, None] == (expert // local)[None, :]
    rank_load = tl.sum(tl.where(at_owner, load[None, :], 0), axis=1)
    total = tl.sum(load, axis=0)
    average = total // ranks
    price = (average.to(tl.float32) * threshold).to(tl.int64)
    even = (total + ranks - 1) // ranks
    if tl.max(rank_load, axis=0) <= average + price:
        # nothing moves, and `_take_best` reads no candidate
        return
    slot_experts += candidate * slots
    slot_tokens += candidate * slots
    if candidate < FILLED:
        step = (candidate % TARGETS).to(tl.int64) - 1
        gap = tl.max(rank_load, axis=0) - even
        target = even + gap * (step * step) // ((TARGETS - 2) * (TARGETS - 2))
        _fill(
            slot_experts,
            slot_tokens,
            load,
            rank_load,
            tl.where(step < 0, even + price, target),
            candidate // TARGETS,
            ranks=ranks,
            experts=experts,
            spares=spares,
            FIRST=FIRST,
            R=R,
            E=E,
            S=S,
        )
    else:
        _spill_over(
            slot_experts,
            slot_tokens,
            scratch + (candidate - FILLED) * SCRATCH,
            load,
            tl.where(rank < ranks, tl.maximum(average - rank_load, 0), 0),
            average,
            candidate > FILLED,
            ranks=ranks,
            experts=experts,
            spares=spares,
            PRIORITIES=PRIORITIES,
            R=R,
            E=E,
        )
    tl.debug_barrier()
    giver = tl.load(slot_experts + slot, mask=slot < slots, other=0) // local
    moved = tl.load(slot_tokens + slot, mask=slot < slots, other=0)
    gives = rank[:, None] == giver[None, :]
    gets = rank[:, None] == (slot // spares)[None, :]
    change = tl.where(gets, moved[None, :], 0) - tl.where(gives, moved[None, :], 0)
    largest = tl.max(rank_load + tl.sum(change, axis=1), axis=0)
    filled = (moved > 0).to(tl.int64)
    given = tl.sum(tl.where(gives, filled[None, :], 0), axis=1)
    gotten = tl.sum(tl.where(gets, filled[None, :], 0), axis=1)
    paid = price * tl.max(tl.maximum(given, gotten), axis=0)
    clones = tl.sum(filled, axis=0)
    tl.store(costs + candidate, (tl.maximum(largest, even) + paid) * (slots + 1) + clones)


@jit
def _fill(
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    left: tl.tensor,
    rank_load: tl.tensor,
    target: tl.tensor,
    way: tl.tensor,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    spares: tl.constexpr,
    FIRST: tl.constexpr,
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
        order = tl.where((way >= 2) & (own >= wanted), FIRST - own, own)
        first = tl.max(order, axis=0)
        best = tl.min(tl.where(order == first, expert, E), axis=0)
        moved = tl.minimum(wanted, tl.where(first > FIRST // 2, FIRST - first, first))
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
def _spill_over(
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
    """Fill slots by the other algorithms, without a threshold."""
    expert = tl.arange(0, E)
    tl.store(scratch + expert, load, mask=expert < experts)
    tl.debug_barrier()
    if packs:
        spread_spills(
            slot_experts,
            slot_tokens,
            scratch,
            load,
            room,
            average,
            ranks=ranks,
            experts=experts,
            spares=spares,
            PACKS=True,
            PRIORITIES=PRIORITIES,
            R=R,
            E=E,
        )
    else:
        spread_spills(
            slot_experts,
            slot_tokens,
            scratch,
            load,
            room,
            average,
            ranks=ranks,
            experts=experts,
            spares=spares,
            PACKS=False,
            PRIORITIES=PRIORITIES,
            R=R,
            E=E,
        )


@jit
def _take_best(
    counts: tl.tensor,
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    costs: tl.tensor,
    best_experts: tl.tensor,
    best_tokens: tl.tensor,
    moved_of_rank: tl.tensor,
    sums: tl.tensor,
    threshold: float,
    candidates: tl.constexpr,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    slots: tl.constexpr,
    FIRST: tl.constexpr,
    SOURCES: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
) -> None:
    candidate, slot = tl.arange(0, C), tl.arange(0, S)
    rank, expert = tl.arange(0, R)[:, None], tl.arange(0, E)
    there = (rank < ranks) & (expert < experts)[None, :]
    load = tl.sum(tl.load(counts + rank * experts + expert[None, :], mask=there, other=0), axis=0)
    at_owner = rank == (expert // (experts // ranks))[None, :]
    rank_load = tl.sum(tl.where(at_owner, load[None, :], 0), axis=1)
    average = tl.sum(load, axis=0) // ranks
    price = (average.to(tl.float32) * threshold).to(tl.int64)
    uneven = tl.max(rank_load, axis=0) > average + price  # otherwise no candidate was tried
    tried = (candidate < candidates) & uneven
    cost = tl.load(costs + candidate, mask=tried, other=FIRST)
    best = tl.min(tl.where(cost == tl.min(cost, axis=0), candidate, C), axis=0)
    at = best * slots + slot
    filled = (slot < slots) & uneven
    write_plan(
        counts,
        best_experts,
        best_tokens,
        moved_of_rank,
        sums,
        tl.load(slot_experts + at, mask=filled, other=0),
        tl.load(slot_tokens + at, mask=filled, other=0),
        rank_load,
        ranks=ranks,
        experts=experts,
        slots=slots,
        SOURCES=SOURCES,
        R=R,
        S=S,
    )
