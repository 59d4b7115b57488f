"""Counts of routed tokens, and what holds of every plan of clones that is made of them.

Shapes: R ranks, E experts, S slots.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import Tensor

import app.moe.echo
from app.choices import CloneAlgorithm
from app.kernels.clones import plan as kernels
from app.kernels.clones.reroute import reroute
from app.kernels.expert_rows import count_choices
from tests.moe_kernels import DEVICE, twice

PACKS = CloneAlgorithm.approx_bin_packing
SEARCHES = CloneAlgorithm.target_search
# tokens for three experts of each of five ranks: what the first rank gives away is not enough
STAYS_ABOVE = (150, 160, 170, 50, 50, 90, 0, 0, 0, 0, 0, 0, 80, 0, 0)


def draw_counts(ranks: int, local: int, most: int, seed: int) -> Tensor:
    """Counts of which a few experts have most: int64 [R, E]. Small ones have many equals."""
    drawn = torch.Generator().manual_seed(seed)
    experts = ranks * local
    popular_E = torch.rand(experts, generator=drawn) ** 3
    shares_RE = torch.rand(ranks, experts, generator=drawn) * popular_E
    return (shares_RE * (most + 1)).long().to(DEVICE)


def draw_options(ranks: int, local: int, seed: int) -> tuple[int, CloneAlgorithm, float]:
    """Spares per rank, algorithm and threshold."""
    drawn = random.Random(seed)
    algorithm = drawn.choice(list(CloneAlgorithm))
    spares = 1 if algorithm is PACKS else drawn.randint(1, min(4, ranks * local))
    return spares, algorithm, drawn.choice([0.0, 0.0, 0.1, 0.3, 1.0])


def check_kernel(
    counts_RE: Tensor, spares: int, algorithm: CloneAlgorithm, threshold: float
) -> None:
    """The kernel's plan is that of plain torch, which must be in place, and so is what it counts;
    both repeat.
    """

    def plan() -> tuple[Tensor, ...]:
        sums_4 = torch.arange(4, device=DEVICE)
        given = counts_RE, spares, algorithm
        return *kernels.plan_clones(*given, threshold=threshold, sums_4=sums_4), sums_4

    expert_S, *found = twice(plan)
    sums_4 = torch.arange(4, device=DEVICE)
    plain = app.moe.echo.plan_slots(
        counts_RE, spares, algorithm, threshold=threshold, sums_4=sums_4
    )
    wanted = plain.moved_S, plain.moved_RS, sums_4
    filled_S = plain.moved_S > 0
    assert torch.equal(expert_S[filled_S], plain.expert_S[filled_S])
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype == torch.int64 and torch.equal(one, other)


def check_reroute_kernel(ranks: int, local: int, top_k: int, most: int, seed: int) -> None:
    """The kernel sends the choices of every rank where plain torch does, which must be in place;
    some are dropped.
    """
    experts = ranks * local
    drawn = torch.Generator().manual_seed(seed)
    scores = torch.rand(ranks, most, experts, generator=drawn)
    scores *= torch.rand(experts, generator=drawn)
    chosen_RTK = scores.topk(top_k).indices
    chosen_RTK[torch.rand(chosen_RTK.shape, generator=drawn) < 1 / 8] = experts
    chosen_RTK = chosen_RTK.to(DEVICE)
    counts_RE = torch.stack(
        [each.flatten().bincount(minlength=experts + 1)[:experts] for each in chosen_RTK]
    )
    spares, algorithm, threshold = draw_options(ranks, local, seed)
    plan = app.moe.echo.plan_slots(counts_RE, spares, algorithm, threshold=threshold)
    moved_ES, moved_RS = plan.by_expert(experts), plan.moved_RS
    for rank, experts_TK in enumerate(chosen_RTK):
        run = partial(
            reroute,
            experts_TK,
            count_choices(experts_TK, 0, experts),
            plan.expert_S,
            moved_S=plan.moved_S,
            moved_R_S=plan.moved_RS[rank],
            ranks=ranks,
        )
        (found,) = twice(lambda run=run: (run(),))
        assert torch.equal(found, app.moe.echo.reroute(experts_TK, moved_ES, moved_RS, rank))


def loads_after(counts_RE: Tensor, moved_ES: Tensor) -> Tensor:
    """Tokens that each rank computes when those of the plan have moved: [R]."""
    ranks = len(counts_RE)
    stay_R = (counts_RE.sum(dim=0) - moved_ES.sum(dim=1)).view(ranks, -1).sum(dim=1)
    return stay_R + moved_ES.sum(dim=0).view(ranks, -1).sum(dim=1)


def check_plan(
    counts_RE: Tensor,
    moved_ES: Tensor,
    moved_RS: Tensor,
    algorithm: CloneAlgorithm = CloneAlgorithm.one_shot_greedy,
) -> None:
    """Nobody gives what it has not; a slot has one expert, of another rank; no rank ends up with
    more than before or the average, or by `target_search` than the fullest had, and totals agree.
    """
    ranks, experts = counts_RE.shape
    assert (moved_ES >= 0).all() and (moved_RS >= 0).all()
    assert torch.equal(moved_ES.sum(dim=0), moved_RS.sum(dim=0))
    assert ((moved_ES > 0).sum(dim=0) <= 1).all()
    given_RE = (moved_RS[:, None] * (moved_ES > 0)).sum(dim=2)
    assert (given_RE <= counts_RE).all()
    assert torch.equal(given_RE.sum(dim=0), moved_ES.sum(dim=1))
    expert_of, slot_of = moved_ES.nonzero(as_tuple=True)
    home, host = expert_of // (experts // ranks), slot_of // (moved_ES.shape[1] // ranks)
    assert (home != host).all()
    load_R = counts_RE.sum(dim=0).view(ranks, -1).sum(dim=1)
    after_R = loads_after(counts_RE, moved_ES)
    assert after_R.sum() == load_R.sum()
    filled = load_R.max() if algorithm is SEARCHES else load_R.sum() // ranks
    assert (after_R <= torch.maximum(load_R, filled)).all()
