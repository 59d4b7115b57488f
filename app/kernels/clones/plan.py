"""The whole clone plan of `app.moe.echo.plan_clones` in one program: integers, sums in any order,
no atomics.

Instead of sorting, each element is compared with all others: the sum over everything before it
replaces its place in the sorted order. Vectors compared with themselves go through memory, behind a
barrier, and are read one element at a time; of spills only the few that are not empty.

Shapes: R ranks · E experts, L of each rank · S slots. In kernels R, E, LOCAL and S are powers of
two that hold these.
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

WARPS = 4  # of the only program


def plan_clones(
    counts_RE: Tensor, spares: int, packs: bool, *, threshold: float, sums_4: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the expert of each slot, and tokens that move by slot and by source rank and slot:
    int64 [S], [S], [R, S].

    packs: use `approx_bin_packing`, not `one_shot_greedy`. Adds loads to `sums_4`
    (`app.moe.echo.plan_slots`).
    """
    ranks, experts = counts_RE.shape
    slots = ranks * spares
    expert_S, moved_S = counts_RE.new_empty(2, slots).unbind()
    moved_RS = counts_RE.new_empty(ranks, slots)
    padded = block_of(experts)
    local = block_of(experts // ranks)
    _plan[(1,)](
        counts_RE.contiguous(),
        counts_RE.new_empty(scratch_of(ranks, experts)),
        expert_S,
        moved_S,
        moved_RS,
        sums_4,
        float(threshold),
        ranks=ranks,
        experts=experts,
        spares=spares,
        PACKS=packs,
        LIMITS=threshold > 0,
        SOURCES=sources_at_once(ranks, slots),
        PRIORITIES=PRIORITIES,
        R=block_of(ranks),
        E=padded,
        LOCAL=local,
        S=block_of(slots),
        num_warps=WARPS,
    )
    return expert_S, moved_S, moved_RS


@jit
def _plan(
    counts: tl.tensor,
    scratch: tl.tensor,
    slot_experts: tl.tensor,
    slot_tokens: tl.tensor,
    moved_of_rank: tl.tensor,
    sums: tl.tensor,
    threshold: float,
    ranks: tl.constexpr,
    experts: tl.constexpr,
    spares: tl.constexpr,
    PACKS: tl.constexpr,
    LIMITS: tl.constexpr,
    SOURCES: tl.constexpr,
    PRIORITIES: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    LOCAL: tl.constexpr,
    S: tl.constexpr,
) -> None:
    local: tl.constexpr = experts // ranks
    slots: tl.constexpr = ranks * spares
    rank = tl.arange(0, R)
    expert = tl.arange(0, E)
    at = rank[:, None] * experts + expert[None, :]
    there = (rank < ranks)[:, None] & (expert < experts)[None, :]
    load = tl.sum(tl.load(counts + at, mask=there, other=0), axis=0)
    average = tl.sum(load, axis=0) // ranks
    tl.store(scratch + expert, load, mask=expert < experts)
    tl.debug_barrier()
    near = tl.arange(0, LOCAL)[None, :]
    own = (rank < ranks)[:, None] & (near < local)
    rank_load = tl.sum(tl.load(scratch + rank[:, None] * local + near, mask=own, other=0), axis=1)
    room = tl.where(rank < ranks, tl.maximum(average - rank_load, 0), 0)
    limit = average + (average.to(tl.float32) * threshold).to(tl.int64)
    uneven = tl.max(rank_load, axis=0) > limit  # otherwise nothing moves
    if uneven:
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
            PACKS=PACKS,
            PRIORITIES=PRIORITIES,
            R=R,
            E=E,
        )
    tl.debug_barrier()
    slot = tl.arange(0, S)
    filled = (slot < slots) & uneven
    supplier = tl.load(slot_experts + slot, mask=filled, other=0)
    moved = tl.load(slot_tokens + slot, mask=filled, other=0)
    if LIMITS:
        moved = _needed(supplier // local, moved, rank_load, limit, R=R, S=S)
    tl.debug_barrier()
    write_plan(
        counts,
        slot_experts,
        slot_tokens,
        moved_of_rank,
        sums,
        supplier,
        moved,
        rank_load,
        ranks=ranks,
        experts=experts,
        slots=slots,
        SOURCES=SOURCES,
        R=R,
        S=S,
    )


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
