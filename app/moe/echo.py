"""ECHO (elastic cloning of hot experts): plans which experts get replicas ("clones") on which
ranks, how many tokens each replica takes, and which ones.

Every rank computes the same plan from the counts of all ranks, without synchronizing with the
device. Source: Megatron-LM pull request 2368; `plan_clones` says where it divides by zero or leaves
ties open.

Shapes: R ranks · E experts, rank r owns the L = E/R from r·L on · S = R·spares slots for clones,
slot j is on rank j // spares, N = spares · T tokens of this rank, K experts of each, in C blocks of
tokens · P = E·(S + 1) places: an expert's slots, then its owner rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.choices import CloneAlgorithm
from app.kernels.clones import plan as planner
from app.kernels.clones import reroute as kernels
from app.kernels.clones.slots import PRIORITIES
from app.kernels.common import usable
from app.kernels.expert_rows import count_choices as kernel_counts
from app.moe.permute import sort_by_expert
from app.moe.target_search import loads_after, search_slots


@dataclass(frozen=True, slots=True)
class ClonePlan:
    """Expert of each slot, and the tokens that go there: int64, on the device."""

    expert_S: Tensor  # arbitrary if the slot is empty
    moved_S: Tensor  # tokens that go to a slot
    moved_RS: Tensor  # by source rank

    def by_expert(self, experts: int) -> Tensor:
        """Return the tokens of each expert that go to each slot: [E, S]."""
        moved_ES = self.moved_S.new_zeros(experts, len(self.moved_S))
        return moved_ES.scatter(0, self.expert_S[None], self.moved_S[None])


def count_choices(experts_TK: Tensor, experts: int) -> Tensor:
    """Count this rank's tokens per expert and block of tokens: integers [C, E].

    Kernels need the blocks. Dropped choices have the id E; a token's other ids differ.
    """
    if experts_TK.is_cuda and usable():
        return kernel_counts(experts_TK, 0, experts)
    ids = experts_TK.flatten().long()
    counts = ids.new_zeros(experts + 1).scatter_add_(0, ids, torch.ones_like(ids))
    return counts[None, :experts]


def plan_clones(
    counts_RE: Tensor,
    spares_per_rank: int,
    algorithm: CloneAlgorithm | str = CloneAlgorithm.one_shot_greedy,
    threshold: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Plan how many tokens move to clones: by expert and slot, int64 [E, S], and by source rank and
    slot, int64 [R, S].

    `counts_RE` (int64) holds the tokens that each rank has for each expert.

    1. The experts of a rank, smallest first, keep what fits below the average of all ranks (rounded
       down); the rest is its spill. Ranks below the average have room.
    2. `one_shot_greedy` lays spills and rooms, both largest first, along one line each: overlaps
       may move. A rank takes its `spares_per_rank` largest overlaps.
       `approx_bin_packing` (one spare) gives each room, largest first, the spill that is largest in
       sevenths of the average, first come first served within a seventh.
       `target_search` fills rooms from the ranks that are most above a target load, tries many
       targets, and takes the plan of the lowest cost: see `app.moe.target_search`.
    3. With a `threshold`, ranks move only what would leave them above (1 + threshold) times the
       average: a slot is left empty if its tokens, with those of the rank's smaller slots, may
       stay. If a rank stays above the limit even with all slots filled, none is left empty.
       `target_search` makes a clone only if it relieves the fullest rank by `threshold` times the
       average, so nothing moves while no rank is above the limit either.
    4. A slot takes tokens from every source rank in proportion, rounded down, and what is still
       missing from the first ranks on.

    Ties are broken by index. Each slot holds one expert. ValueError for an unknown algorithm or a
    number of slots that it cannot fill.
    """
    plan = plan_slots(counts_RE, spares_per_rank, algorithm, threshold=threshold)
    return plan.by_expert(counts_RE.shape[1]), plan.moved_RS


def plan_slots(
    counts_RE: Tensor,
    spares_per_rank: int,
    algorithm: CloneAlgorithm | str,
    *,
    threshold: float,
    sums_4: Tensor | None = None,
) -> ClonePlan:
    """Plan as `plan_clones` does, and return the plan by slot.

    Adds to `sums_4` (int64): tokens of the fullest rank without and with clones, tokens of all
    ranks, filled slots.
    """
    ranks, experts = counts_RE.shape
    known = _known(algorithm)
    _check_sizes(ranks, experts, spares_per_rank, algorithm=known)
    # no rank exceeds R times the average; keeps the limit within int64
    threshold = min(threshold, ranks)
    if counts_RE.is_cuda and usable():
        return ClonePlan(
            *planner.plan_clones(
                counts_RE, spares_per_rank, known, threshold=threshold, sums_4=sums_4
            )
        )
    load_RL = counts_RE.sum(dim=0).view(ranks, -1)
    expert_S, moved_S = _slots(load_RL, spares_per_rank, known, threshold=threshold)
    if sums_4 is not None:
        load_R, filled = load_RL.sum(dim=1), (moved_S > 0).sum()
        after_R = loads_after(load_RL, expert_S[None], moved_S[None])[0]
        sums_4 += torch.stack((load_R.max(), after_R.max(), load_R.sum(), filled))
    return ClonePlan(expert_S, moved_S, _sources(counts_RE, expert_S, moved_S))


def reroute(experts_TK: Tensor, moved_ES: Tensor, moved_RS: Tensor, rank: int) -> Tensor:
    """Return the destination of each of this rank's choices under a plan of `plan_clones`: [T, K].

    Ids number what every rank computes, its own experts and then its slots: expert e has the id e
    // L · (L + spares) + e % L, slot j the id j // spares · (L + spares) + L + j % spares. Slots
    are thus further experts of their rank, and dispatchers need not know of them. The first tokens
    of an expert go to its clones, in order of slots; the others stay with the owner rank.

    A choice keeps its place in its token's K, and with it its probability; a token's ids differ
    from each other, but need not ascend. Dropped choices (id E) get R·(L + spares).
    """
    plan = ClonePlan(moved_ES.argmax(dim=0), moved_ES.sum(dim=0), moved_RS)
    return follow_plan(experts_TK, plan, rank, count_choices(experts_TK, len(moved_ES)))


def follow_plan(experts_TK: Tensor, plan: ClonePlan, rank: int, counts_CE: Tensor) -> Tensor:
    """Return `reroute` for a plan as it was made; `counts_CE` are those of `count_choices`."""
    experts, (ranks, slots) = counts_CE.shape[1], plan.moved_RS.shape
    if experts_TK.is_cuda and usable():
        return kernels.reroute(
            experts_TK,
            counts_CE,
            plan.expert_S,
            moved_S=plan.moved_S,
            moved_R_S=plan.moved_RS[rank],
            ranks=ranks,
        )
    gone_ES = torch.where(plan.by_expert(experts) > 0, plan.moved_RS[rank], 0)
    stays_E = counts_CE.sum(dim=0) - gone_ES.sum(dim=1)
    # order of an expert's tokens: its first slot, its second, …, its owner rank
    ends_P = torch.cat((gone_ES, stays_E[:, None]), dim=1).flatten().cumsum(0)
    row_of_TK = sort_by_expert(experts_TK, experts, drops=True).row_of_TK
    slot_TK = torch.searchsorted(ends_P, row_of_TK, right=True) % (slots + 1)
    chosen_TK = experts_TK.long()
    local, spares = experts // ranks, slots // ranks
    own_TK = chosen_TK // local * (local + spares) + chosen_TK % local
    clone_TK = slot_TK // spares * (local + spares) + local + slot_TK % spares
    all_TK = torch.where(slot_TK < slots, clone_TK, own_TK)
    return all_TK.masked_fill(chosen_TK >= experts, ranks * (local + spares))


def _slots(
    load_RL: Tensor, spares: int, algorithm: CloneAlgorithm, *, threshold: float
) -> tuple[Tensor, Tensor]:
    """Return expert and tokens of each slot: [S]; the expert of an empty slot is arbitrary."""
    load_R = load_RL.sum(dim=1)
    average = load_R.sum() // len(load_R)
    room_R = (average - load_R).clamp(min=0)
    spill_E = _spill(load_RL, average)
    limit = average + (average.float() * threshold).floor().long()
    if algorithm is CloneAlgorithm.target_search:
        others = [_greedy(spill_E, room_R, spares)]
        if spares == 1:
            others.append(_packed(spill_E, room_R, average))
        return search_slots(load_RL, spares, limit - average, others=others)
    if algorithm is CloneAlgorithm.approx_bin_packing:
        expert_S, moved_S = _packed(spill_E, room_R, average)
    else:
        expert_S, moved_S = _greedy(spill_E, room_R, spares)
    if threshold > 0:
        moved_S = moved_S * _needed(expert_S // load_RL.shape[1], moved_S, load_R, limit=limit)
    return expert_S, moved_S


def _spill(load_RL: Tensor, average: Tensor) -> Tensor:
    """Return the tokens of each expert beyond the average of its rank, smallest experts first:
    [E].
    """
    sorted_RL, local_RL = load_RL.sort(dim=1, stable=True)
    end_RL = sorted_RL.cumsum(dim=1)
    spill_RL = (end_RL - average).clamp(min=0) - (end_RL - sorted_RL - average).clamp(min=0)
    return torch.empty_like(spill_RL).scatter_(1, local_RL, spill_RL).flatten()


def _greedy(spill_E: Tensor, room_R: Tensor, spares: int) -> tuple[Tensor, Tensor]:
    """Return expert and tokens of each slot: [S]; the expert of an empty slot is arbitrary."""
    spill_E, expert_E = spill_E.sort(descending=True, stable=True)
    room_R, rank_R = room_R.sort(descending=True, stable=True)
    spill_end_E1, room_end_R = spill_E.cumsum(0)[:, None], room_R.cumsum(0)
    first_ER = torch.maximum(spill_end_E1 - spill_E[:, None], room_end_R - room_R)
    overlap_ER = (torch.minimum(spill_end_E1, room_end_R) - first_ER).clamp(min=0)
    overlap_ER, nth_ER = overlap_ER.sort(dim=0, descending=True, stable=True)
    place_R = rank_R.argsort()
    moved_RN, nth_RN = (value[:spares].t()[place_R] for value in (overlap_ER, nth_ER))
    return expert_E[nth_RN].flatten(), moved_RN.flatten()


def _packed(spill_E: Tensor, room_R: Tensor, average: Tensor) -> tuple[Tensor, Tensor]:
    """Return expert and tokens of each slot: [R], as there is one per rank."""
    left_E, expert_E = spill_E.sort(descending=True, stable=True)
    room_R, rank_R = room_R.sort(descending=True, stable=True)
    step = (average // (PRIORITIES - 1)).clamp(min=1)
    # an expert that has given tokens queues up again behind all others
    turn_E = torch.arange(len(left_E), device=left_E.device)
    turns = len(left_E) + len(room_R)
    nth_R, moved_R = torch.empty_like(rank_R), torch.empty_like(room_R)
    for place in range(len(room_R)):
        below_E = ((average - left_E) // step + 1).clamp(0, PRIORITIES - 1)
        priority_E = torch.where(left_E >= average, 0, below_E)
        priority_E = priority_E.masked_fill(left_E <= 0, PRIORITIES)
        nth = (priority_E * turns + turn_E).argmin(dim=0, keepdim=True)
        moved = torch.minimum(left_E[nth], room_R[place])
        left_E = left_E.scatter_add(0, nth, -moved)
        turn_E = turn_E.scatter(0, nth, len(left_E) + place)
        nth_R[place], moved_R[place] = nth[0], moved[0]
    place_R = rank_R.argsort()
    return expert_E[nth_R][place_R], moved_R[place_R]


def _needed(owner_S: Tensor, moved_S: Tensor, load_R: Tensor, limit: Tensor) -> Tensor:
    """Return which slots must be filled so that no rank has more than `limit`: bool [S]."""
    slots = torch.arange(len(moved_S), device=moved_S.device)
    before_SS = (moved_S[:, None] < moved_S) | (
        (moved_S[:, None] == moved_S) & (slots[:, None] <= slots)
    )
    same_SS = owner_S[:, None] == owner_S
    stays_S = (moved_S[:, None] * (before_SS & same_SS)).sum(dim=0)
    left_R = load_R.scatter_add(0, owner_S, -moved_S)
    return (left_R[owner_S] + stays_S > limit) | (left_R > limit).any()


def _sources(counts_RE: Tensor, expert_S: Tensor, moved_S: Tensor) -> Tensor:
    """Return the tokens that each source rank sends to each slot: [R, S]."""
    counts_RS = counts_RE[:, expert_S]
    total_S = counts_RS.sum(dim=0).clamp(min=1)
    share_RS = counts_RS * moved_S // total_S
    missing_S = moved_S - share_RS.sum(dim=0)
    same_SS = expert_S[:, None] == expert_S
    left_RS = counts_RS - (share_RS[:, :, None] * same_SS).sum(dim=1)
    end_RS = left_RS.cumsum(dim=0)
    missing_end_S = (missing_S[:, None] * same_SS.triu()).sum(dim=0)
    first_RS = torch.maximum(end_RS - left_RS, missing_end_S - missing_S)
    return share_RS + (torch.minimum(end_RS, missing_end_S) - first_RS).clamp(min=0)


def _known(algorithm: CloneAlgorithm | str) -> CloneAlgorithm:
    if isinstance(algorithm, CloneAlgorithm):
        return algorithm
    try:
        return CloneAlgorithm[algorithm]  # by name, which knows the alias `exact` as well
    except KeyError:
        raise ValueError(
            f"algorithm={algorithm!r}: must be one of {', '.join(a.value for a in CloneAlgorithm)}"
        ) from None


def _check_sizes(ranks: int, experts: int, spares: int, algorithm: CloneAlgorithm) -> None:
    if experts % ranks:
        raise ValueError(f"{experts} experts cannot be divided among {ranks} ranks")
    most = 1 if algorithm is CloneAlgorithm.approx_bin_packing else experts
    if not 1 <= spares <= most:
        raise ValueError(
            f"spares_per_rank={spares}: must be 1 to {most} with {experts} experts and "
            f"algorithm={algorithm.value}; nearest that works: {min(max(spares, 1), most)}"
        )
