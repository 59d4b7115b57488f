"""Clone plans by searching target loads: the algorithm `target_search` of
`app.moe.echo.plan_clones`.

With one slot and one expert per rank this is the alias method (Walker 1977, Vose 1991): a rank
below the target is raised to it by a rank above it, and if that drops the giver below the
target, its own slot is filled in turn. R - 1 clones then suffice for even loads. With several
experts per rank, an expert may be too small to fill a room alone. So a fixed set of candidates is
tried, 32 target loads times 4 rules of choosing what moves, plus the other algorithms' plans, and
the plan of the lowest cost is taken. That need not be the optimum: the smallest possible maximum
load is NP-hard to find (3-partition: rooms of one slot each, filled by experts whose tokens all
have to move).

The cost of a clone is given in tokens: what the fullest rank could compute while the clone's
weights and gradients are sent. Links transfer in parallel, so only the clones of the rank that
sends or receives most are charged. A clone that relieves the fullest rank by less is not made.
Guarantees if the price is 0, and the target the average rounded up:

- The maximum load is at most that of either other algorithm, and at most that without clones.
- No load is above the target if none was below (1 - s/L) of it, hence always if s >= L: a rank
  above the target has an expert with more than 1/L of it, and s of those fill any room. What the
  giver then lacks is less than the room that it filled.

docs/moe.md compares the maximum load with the smallest possible one.

Shapes: R ranks · E experts, L of each rank · S slots, s of each rank · C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.clones import plan as kernels


def search_slots(
    load_RL: Tensor, spares: int, price: Tensor, others: list[tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return expert and tokens of each slot, [S], of the best candidate; `others` are further
    candidates.

    The best has the lowest cost: the load of the fullest rank, at least the average rounded up,
    plus `price` tokens for each clone of the rank that sends or receives most of them. Ties go to
    fewer clones, then to the first candidate. So nothing moves while no rank exceeds the average by
    more than `price`. The expert of an empty slot is arbitrary.
    """
    steps, ways = kernels.TARGETS, kernels.WAYS
    load_R = load_RL.sum(dim=1)
    even = (load_R.sum() + len(load_R) - 1) // len(load_R)
    step = torch.arange(steps - 1, device=load_RL.device)
    target_C = even + (load_R.max() - even) * step**2 // (steps - 2) ** 2
    target_C = torch.cat(((even + price)[None], target_C))
    way_C = torch.arange(ways, device=load_RL.device).repeat_interleave(steps)
    filled = _filled(load_RL, spares, target_C.repeat(ways), way_C % 2 == 1, fits_C=way_C >= 2)
    expert_CS, moved_CS = (
        torch.cat((first_CS, *(each_S[None] for each_S in others_S)))
        for first_CS, others_S in zip(filled, zip(*others, strict=True), strict=True)
    )
    clones_C = (moved_CS > 0).sum(dim=1)
    largest_C = loads_after(load_RL, expert_CS, moved_CS).amax(dim=1)
    paid_C = price * _busiest(load_RL, spares, expert_CS, moved_CS=moved_CS)
    cost_C = (torch.maximum(largest_C, even) + paid_C) * (moved_CS.shape[1] + 1) + clones_C
    best = cost_C.argmin(dim=0, keepdim=True)
    return expert_CS[best][0], moved_CS[best][0]


def _filled(
    load_RL: Tensor, spares: int, target_C: Tensor, passes_on_C: Tensor, fits_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill slots up to each candidate's target, until no rank is above it or no slot is of use:
    expert and tokens of each slot, [C, S].

    Each step, the rank with the largest room and a free slot receives tokens of one expert of the
    rank that is most above the target: of its largest expert, or with `fits` of the smallest that
    is large enough. It receives the giver's excess; with `passes_on` as much as fits, if other
    ranks are above the target too. A rank above the target was never filled, so its own slots are
    free for what it then lacks.
    """
    ranks, local = load_RL.shape
    count, slots = len(target_C), ranks * spares
    target_C1, passes_on_C1, fits_C1 = target_C[:, None], passes_on_C[:, None], fits_C[:, None]
    owner_E = torch.arange(ranks * local, device=load_RL.device) // local
    left_CE = load_RL.flatten().repeat(count, 1)
    load_CR = load_RL.sum(dim=1).repeat(count, 1)
    free_CR = torch.full_like(load_CR, spares)
    expert_CS, moved_CS = left_CE.new_zeros(2, count, slots).unbind()
    for _ in range(slots):
        room_CR = (target_C1 - load_CR).clamp(min=0) * (free_CR > 0)
        over_CR = (load_CR - target_C1).clamp(min=0)
        host_C1, giver_C1 = (value.argmax(dim=1, keepdim=True) for value in (room_CR, over_CR))
        room_C1, over_C1 = room_CR.gather(1, host_C1), over_CR.gather(1, giver_C1)
        more_C1 = passes_on_C1 & (over_CR.sum(dim=1, keepdim=True) > over_C1)
        wanted_C1 = torch.where(more_C1, room_C1, torch.minimum(room_C1, over_C1))
        own_CE = torch.where(owner_E == giver_C1, left_CE, -1)
        order_CE = torch.where(fits_C1 & (own_CE >= wanted_C1), 2**62 - own_CE, own_CE)
        expert_C1 = order_CE.argmax(dim=1, keepdim=True)
        moved_C1 = torch.minimum(wanted_C1, left_CE.gather(1, expert_C1))
        slot_C1 = host_C1 * spares + (spares - free_CR.gather(1, host_C1)).clamp(max=spares - 1)
        # once nothing moves, no later step moves anything: an empty slot is not overwritten
        expert_CS.scatter_add_(1, slot_C1, expert_C1 * (moved_C1 > 0))
        moved_CS.scatter_add_(1, slot_C1, moved_C1)
        left_CE.scatter_add_(1, expert_C1, -moved_C1)
        load_CR.scatter_add_(1, giver_C1, -moved_C1).scatter_add_(1, host_C1, moved_C1)
        free_CR.scatter_add_(1, host_C1, -(moved_C1 > 0).long())
    return expert_CS, moved_CS


def loads_after(load_RL: Tensor, expert_CS: Tensor, moved_CS: Tensor) -> Tensor:
    """Return the tokens of each rank under each candidate: [C, R]."""
    ranks, local = load_RL.shape
    load_CR = load_RL.sum(dim=1).repeat(len(moved_CS), 1)
    load_CR.scatter_add_(1, expert_CS // local, -moved_CS)
    return load_CR + moved_CS.view(len(moved_CS), ranks, -1).sum(dim=2)


def _busiest(load_RL: Tensor, spares: int, expert_CS: Tensor, moved_CS: Tensor) -> Tensor:
    """Return the clones of the rank that sends or receives most: [C]."""
    ranks, local = load_RL.shape
    filled_CS = (moved_CS > 0).long()
    given_CR = filled_CS.new_zeros(len(moved_CS), ranks)
    given_CR.scatter_add_(1, expert_CS // local, filled_CS)
    gotten_CR = filled_CS.view(-1, ranks, spares).sum(dim=2)
    return torch.maximum(given_CR, gotten_CR).amax(dim=1)
