"""The clone plan of `app.moe.echo.plan_clones` in two launches: one program per candidate, then one
that writes the plan of the best. `app.moe.target_search` lists the candidates of `target_search`,
in this order; of the other algorithms there is one.

Shapes: R ranks · E experts, L of each rank · S slots · C candidates. In kernels R, E, S and C are
powers of two that hold these.
"""

from __future__ import annotations

from torch import Tensor

from app.choices import CloneAlgorithm
from app.kernels.clones.slots import PRIORITIES, fill_to_target, scratch_of, spread_spills
from app.kernels.common import jit, tl
from app.kernels.tiling import block_of

TARGETS = 32  # the average plus a clone's price, then from the average to the largest load
WAYS = 4  # rules of choosing what moves, per target
WARPS = 4  # per candidate
LAST_WARPS = 2  # of the program that writes the best plan
SOURCES = 4096  # (rank, slot, slot) triples processed together


def plan_clones(
    counts_RE: Tensor,
    spares: int,
    algorithm: CloneAlgorithm,
    *,
    threshold: float,
    sums_4: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the expert of each slot, and tokens that move by slot and by source rank and slot:
    int64 [S], [S], [R, S].

    Adds loads to `sums_4` (`app.moe.echo.plan_slots`).
    """
    ranks, experts = counts_RE.shape
    slots = ranks * spares
    searches = algorithm is CloneAlgorithm.target_search
    packs = algorithm is CloneAlgorithm.approx_bin_packing
    targets = WAYS * TARGETS if searches else 0
    greedy = 0 if packs else 1
    candidates = targets + greedy + (1 if packs or (searches and spares == 1) else 0)
    counts_RE = counts_RE.contiguous()
    costs_C = counts_RE.new_empty(candidates)
    expert_CS, moved_CS = counts_RE.new_empty(2, candidates, slots).unbind()
    sizes = {"R": block_of(ranks), "E": block_of(experts), "S": block_of(slots)}
    _try[(candidates,)](
        counts_RE,
        counts_RE.new_empty(candidates - targets, scratch_of(ranks, experts)),
        expert_CS,
        moved_CS,
        costs_C,
        float(threshold),
        ranks=ranks,
        experts=experts,
        spares=spares,
        TARGETS=TARGETS,
        FILLED=targets,
        GREEDY=greedy,
        SCRATCH=scratch_of(ranks, experts),
        PRIORITIES=PRIORITIES,
        num_warps=WARPS,
        **sizes,
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
        LIMITS=threshold > 0 and not searches,
        SOURCES=min(block_of(ranks), max(1, SOURCES // block_of(slots) ** 2)),
        C=block_of(candidates),
        num_warps=LAST_WARPS,
        **sizes,
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
    GREEDY: tl.constexpr,
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
        fill_to_target(
            slot_experts,
            slot_tokens,
            load,
            rank_load,
            tl.where(step < 0, even + price, target),
            candidate // TARGETS,
            ranks=ranks,
            experts=experts,
            spares=spares,
            R=R,
            E=E,
            S=S,
        )
    else:
        spread_spills(
            slot_experts,
            slot_tokens,
            scratch + (candidate - FILLED) * SCRATCH,
            load,
            tl.where(rank < ranks, tl.maximum(average - rank_load, 0), 0),
            average,
            candidate >= FILLED + GREEDY,
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
    LIMITS: tl.constexpr,
    SOURCES: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
) -> None:
    """Write the plan of the lowest cost by slot, and by source rank and slot; add loads to `sums`
    if given. LIMITS: only what must move, so that no rank exceeds the average by `threshold`.
    """
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
    cost = tl.load(costs + candidate, mask=tried, other=2**62)
    best = tl.min(tl.where(cost == tl.min(cost, axis=0), candidate, C), axis=0)
    at = best * slots + slot
    filled = (slot < slots) & uneven
    supplier = tl.load(slot_experts + at, mask=filled, other=0)
    moved = tl.load(slot_tokens + at, mask=filled, other=0)
    if LIMITS:
        owner = supplier // (experts // ranks)
        moved = _needed(owner, moved, rank_load, average + price, R=R, S=S)
    tl.store(best_experts + slot, supplier, mask=slot < slots)
    tl.store(best_tokens + slot, moved, mask=slot < slots)
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
        place = rank * slots + slot[None, :]
        inside = (rank < ranks) & (slot < slots)[None, :]
        tl.store(moved_of_rank + place, tl.zeros((R, S), tl.int64), mask=inside)


@jit
def _needed(
    owner: tl.tensor,
    moved: tl.tensor,
    rank_load: tl.tensor,
    limit: tl.tensor,
    R: tl.constexpr,
    S: tl.constexpr,
) -> tl.tensor:
    """Return the tokens of slots that must be filled so that no rank has more than `limit`,
    otherwise 0.
    """
    slot = tl.arange(0, S)
    at_owner = tl.arange(0, R)[:, None] == owner[None, :]
    left = rank_load - tl.sum(tl.where(at_owner, moved[None, :], 0), axis=1)
    smaller = moved[:, None] < moved[None, :]
    before = smaller | ((moved[:, None] == moved[None, :]) & (slot[:, None] <= slot[None, :]))
    before &= owner[:, None] == owner[None, :]
    stays = tl.sum(tl.where(before, moved[:, None], 0), axis=0)
    stays += tl.sum(tl.where(at_owner, left[:, None], 0), axis=0)
    anywhere = tl.max((left > limit).to(tl.int32), axis=0)
    return tl.where((stays > limit) | (anywhere > 0), moved, 0)


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
