"""Clone plans by `target_search` against the smallest possible load, and their guarantees."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from app.choices import CloneAlgorithm
from app.moe.echo import plan_clones
from tests.echo_plans import PACKS, SEARCHES, check_plan, draw_counts, loads_after

# ranks, experts of each, spares
SMALL = [(2, 4, 1), (3, 2, 1), (4, 1, 1), (4, 2, 1), (3, 3, 1), (3, 2, 2), (2, 4, 2)]
SIZES = [(2, 32, 1), (4, 6, 2), (8, 8, 1), (8, 32, 1), (8, 32, 2), (8, 8, 4), (16, 4, 1)]


def smallest_load(counts_RE: Tensor, spares: int) -> int:
    """The smallest load of the fullest rank that any clones allow: tokens of experts that only some
    ranks have must be computed there, and nothing else keeps loads from being even.
    """
    ranks, experts = counts_RE.shape
    load_E = counts_RE.sum(dim=0)
    places_PE = torch.tensor([[1 << e * ranks // experts for e in range(experts)]])
    for rank in range(ranks):
        others = [e for e in range(experts) if e * ranks // experts != rank]
        cloned = torch.zeros(0, experts, dtype=torch.int64)
        for held in itertools.combinations(others, spares):
            cloned = torch.cat((cloned, torch.zeros(1, experts, dtype=torch.int64)))
            cloned[-1, list(held)] = 1 << rank
        places_PE = (places_PE[:, None] | cloned).flatten(0, 1)
    largest_P = torch.zeros(len(places_PE), dtype=torch.int64)
    for some in range(1, 1 << ranks):
        within_P = ((places_PE & ~some) == 0).long() @ load_E
        largest_P = torch.maximum(largest_P, -(-within_P // some.bit_count()))
    return int(largest_P.min())


def largest_load(counts_RE: Tensor, spares: int, algorithm: CloneAlgorithm = SEARCHES) -> int:
    """Return the load of the fullest rank after cloning."""
    return int(loads_after(counts_RE, plan_clones(counts_RE, spares, algorithm)[0]).max())


def even_load(counts_RE: Tensor) -> int:
    """The average over ranks, rounded up."""
    return -(-int(counts_RE.sum()) // len(counts_RE))


def rank_loads(counts_RE: Tensor) -> Tensor:
    """Before cloning: [R]."""
    return counts_RE.sum(dim=0).view(len(counts_RE), -1).sum(dim=1)


@pytest.mark.every(18)
@pytest.mark.parametrize(("size", "seed"), [(s, n) for n in range(6) for s in SMALL])
def test_close_to_the_smallest_load_that_there_is(size: tuple[int, int, int], seed: int):
    ranks, local, spares = size
    found, best = [], []
    for nth in range(20):
        counts_RE = draw_counts(ranks, local, (4, 40, 400)[nth % 3], seed=100 * seed + nth)
        found.append(largest_load(counts_RE, spares))
        best.append(smallest_load(counts_RE, spares))
    assert all(one >= other for one, other in zip(found, best, strict=True))
    assert all(one <= 1.1 * other for one, other in zip(found, best, strict=True))
    assert sum(one == other for one, other in zip(found, best, strict=True)) >= 18


@pytest.mark.every(4)
@pytest.mark.parametrize(("local", "seed"), [(n, s) for s in range(12) for n in (2, 3)])
def test_one_full_rank_gets_the_smallest_load_that_there_is(local: int, seed: int):
    """Experts that are just large enough for a room must not be split for another."""
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(12):
        counts_RE = torch.zeros(4, 4 * local, dtype=torch.int64)
        counts_RE[0] = torch.randint(0, 4, (4 * local,), generator=drawn)
        counts_RE[1, :local] = torch.randint(13, 40, (local,), generator=drawn)
        full = rank_loads(counts_RE) > even_load(counts_RE)
        assert full.tolist() == [True, False, False, False]
        assert largest_load(counts_RE, 1) == smallest_load(counts_RE, 1)


def test_experts_are_split_so_that_they_fit():
    """An average of 14 leaves room for 6, 4 and 4: an expert with 6 fits the first, 8 the others.
    If 8 filled the first, the rest would take four clones.
    """
    counts_RE = torch.zeros(4, 64, dtype=torch.int64)
    counts_RE[0, :16] = torch.tensor([8, 6] + [1] * 14)
    counts_RE[1, [16, 32, 48]] = torch.tensor([8, 10, 10])
    moved_ES, _ = plan_clones(counts_RE, 1, SEARCHES)
    assert loads_after(counts_RE, moved_ES).tolist() == [14] * 4
    assert moved_ES[:2].tolist() == [[0, 0, 4, 4], [0, 6, 0, 0]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_one_slot_and_one_expert_per_rank_even_loads_out(ranks: int):
    """The alias method: with fewer clones than ranks."""
    for seed in range(10):
        counts_RE = draw_counts(ranks, 1, 1000, seed=seed)
        moved_ES, moved_RS = plan_clones(counts_RE, 1, SEARCHES)
        check_plan(counts_RE, moved_ES, moved_RS, algorithm=SEARCHES)
        assert loads_after(counts_RE, moved_ES).max() == even_load(counts_RE)
        assert (moved_ES > 0).sum() < ranks


@pytest.mark.parametrize(("local", "spares"), [(2, 1), (4, 1), (3, 2), (2, 2), (1, 1)])
def test_loads_that_slots_can_even_out_for_certain(local: int, spares: int):
    """No rank has less than a share of 1 - spares / local of the average; experts are alike, which
    is the hardest.
    """
    drawn = torch.Generator().manual_seed(local)
    for ranks in (2, 5, 8) * 5:
        least = max(0, 1000 - 1000 * spares // local)
        share_R = torch.rand(ranks, generator=drawn) ** 2
        load_R = least + (share_R / share_R.sum() * (1000 - least) * ranks).long()
        counts_RE = torch.zeros(ranks, ranks * local, dtype=torch.int64)
        counts_RE[0] = (load_R // local + 3).repeat_interleave(local)
        assert (rank_loads(counts_RE) * local >= (local - spares) * even_load(counts_RE)).all()
        assert largest_load(counts_RE, spares) == even_load(counts_RE)


@pytest.mark.every(30)
@pytest.mark.parametrize(("size", "seed"), [(s, n) for n in range(20) for s in SIZES])
def test_never_worse_than_other_algorithms(size: tuple[int, int, int], seed: int):
    ranks, local, spares = size
    for most in (1, 20, 4000):
        counts_RE = draw_counts(ranks, local, most, seed=seed)
        check_plan(counts_RE, *plan_clones(counts_RE, spares, SEARCHES), algorithm=SEARCHES)
        algorithms = [CloneAlgorithm.one_shot_greedy] + [PACKS] * (spares == 1)
        for algorithm in algorithms:
            others = largest_load(counts_RE, spares, algorithm)
            assert largest_load(counts_RE, spares) <= max(others, even_load(counts_RE))


def busiest(moved_ES: Tensor, ranks: int) -> int:
    """Clones of the rank that gives or gets the most."""
    experts, slots = moved_ES.shape
    expert_N, slot_N = moved_ES.nonzero(as_tuple=True)
    given_R = torch.bincount(expert_N // (experts // ranks), minlength=ranks)
    gotten_R = torch.bincount(slot_N // (slots // ranks), minlength=ranks)
    return int(torch.maximum(given_R, gotten_R).max())


@pytest.mark.every(2)
@pytest.mark.parametrize("threshold", [0.02, 0.1, 0.3, 10.0])
def test_clones_are_worth_their_price(threshold: float):
    """Nothing moves within the bound; beyond it what is left to the fullest rank and what clones
    cost is less than with other plans.
    """
    kept = fewer = 0
    for seed in range(10):
        counts_RE = draw_counts(8, 8, 500 if seed % 2 else 5000, seed=seed)
        counts_RE += 40 * seed  # the more even
        average = int(counts_RE.sum()) // 8
        price = int(average * threshold)

        def cost(moved_ES: Tensor, counts_RE: Tensor = counts_RE, price: int = price) -> int:
            return int(loads_after(counts_RE, moved_ES).max()) + price * busiest(moved_ES, 8)

        moved_ES, moved_RS = plan_clones(counts_RE, 2, SEARCHES, threshold)
        check_plan(counts_RE, moved_ES, moved_RS, algorithm=SEARCHES)
        within = rank_loads(counts_RE).max() <= average + price
        kept += bool(within)
        assert moved_ES.sum() == 0 or not within
        every_ES, _ = plan_clones(counts_RE, 2, SEARCHES)
        fewer += busiest(moved_ES, 8) < busiest(every_ES, 8)
        greedy_ES, _ = plan_clones(counts_RE, 2, CloneAlgorithm.one_shot_greedy)
        assert cost(moved_ES) <= min(map(cost, (every_ES, greedy_ES, torch.zeros_like(every_ES))))
    assert 0 < kept < 10 or threshold in (0.02, 10.0)
    assert fewer > 0


def test_a_clone_that_brings_little_is_not_made():
    """With 30 above the average of 100, one clone takes 25 and a second one 5."""
    counts_RE = torch.zeros(2, 16, dtype=torch.int64)
    counts_RE[0] = torch.tensor([25, 25, 20, 15, 15, 10, 10, 10] + [10] * 6 + [5, 5])
    for threshold, left in ((0.0, 100), (0.04, 100), (0.06, 105), (0.24, 105), (0.25, 130)):
        moved_ES, _ = plan_clones(counts_RE, 2, SEARCHES, threshold)
        assert loads_after(counts_RE, moved_ES).max() == left, threshold


def test_clones_of_several_ranks_are_paid_once():
    """Two pairs of ranks even out side by side, for what one of them would pay."""
    counts_RE = torch.tensor([[13, 0, 7, 0, 13, 0, 7, 0]]).repeat(4, 1)
    for threshold, clones in ((0.2, 2), (0.3, 0)):
        moved_ES, _ = plan_clones(counts_RE, 1, SEARCHES, threshold)
        assert (moved_ES > 0).sum() == clones


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_loads_within_the_bound_stay(threshold: float):
    for load in (0, 1, 7, 1000):
        counts_RE = torch.full((4, 8), load)
        counts_RE[0, 0] += int(threshold * load)
        assert plan_clones(counts_RE, 2, SEARCHES, threshold)[0].sum() == 0
    one_token = torch.zeros(4, 8, dtype=torch.int64)
    one_token[1, 3] = 1
    assert plan_clones(one_token, 2, SEARCHES, threshold)[0].sum() == 0
