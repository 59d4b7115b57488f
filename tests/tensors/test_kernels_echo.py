"""The kernel of the plan of clones at small, odd sizes, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from app.choices import CloneAlgorithm
from app.moe.echo import plan_slots
from tests.cases import chosen
from tests.echo_plans import (
    PACKS,
    SEARCHES,
    STAYS_ABOVE,
    check_kernel,
    check_reroute_kernel,
    draw_counts,
    draw_options,
)
from tests.moe_kernels import DEVICE, without_kernels

pytest.importorskip("triton")
plain = pytest.fixture(autouse=True)(without_kernels)


@pytest.fixture(autouse=True)
def few_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """`target_search`, interpreted, each program takes 30 ms."""
    monkeypatch.setattr("app.kernels.clones.plan.TARGETS", 3)


# ranks, experts of each, tokens of a rank for an expert at most
SIZES = [(1, 4, 9), (2, 1, 50), (3, 5, 2), (4, 2, 1), (5, 3, 1500), (6, 1, 30), (8, 8, 300)]


@pytest.mark.every(21)
@pytest.mark.parametrize(("size", "seed"), [(s, n) for n in range(12) for s in SIZES])
def test_plan(size: tuple[int, int, int], seed: int):
    ranks, local, most = size
    spares, algorithm, threshold = draw_options(ranks, local, seed)
    check_kernel(draw_counts(ranks, local, most, seed=seed), spares, algorithm, threshold)


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", CloneAlgorithm)
def test_sources_are_looked_at_in_several_turns(
    algorithm: CloneAlgorithm, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("app.kernels.clones.plan.SOURCES", 32)
    check_kernel(draw_counts(4, 6, 200, seed=1), 1, algorithm, threshold=0.05)


@pytest.mark.parametrize("algorithm", [CloneAlgorithm.one_shot_greedy, PACKS])
def test_all_experts_of_ranks_but_one_spill(algorithm: CloneAlgorithm):
    """By the same number of tokens, but for a few."""
    counts_RE = torch.full((4, 20), 50, dtype=torch.int64, device=DEVICE)
    counts_RE[:, 10:15] = 0
    counts_RE[1, 3:7] += 1
    check_kernel(counts_RE, 1, algorithm, threshold=0.0)


@pytest.mark.parametrize("threshold", [0.3, 0.35])
def test_a_threshold_that_a_rank_stays_above(threshold: float):
    counts_RE = torch.zeros(5, 15, dtype=torch.int64, device=DEVICE)
    counts_RE[0] = torch.tensor(STAYS_ABOVE)
    check_kernel(counts_RE, 1, CloneAlgorithm.one_shot_greedy, threshold)


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", CloneAlgorithm)
def test_counts_beyond_32_bits(algorithm: CloneAlgorithm):
    counts_RE = torch.tensor([[2**40, 0, 3, 1], [5, 2**33 + 1, 7, 0]], device=DEVICE)
    check_kernel(counts_RE, 1 if algorithm is PACKS else 2, algorithm, threshold=0.0)


@pytest.mark.parametrize("most", chosen([3, 40, 100_000], [40]))
def test_packed_by_more_ranks_than_spills_and_by_fewer(most: int):
    """One expert to a rank, and as many to each that rooms take from some several times."""
    for ranks, local in ((7, 1), (8, 4), (16, 2)):
        check_kernel(draw_counts(ranks, local, most, seed=ranks), 1, PACKS, threshold=0.0)
    concentrated_RE = torch.zeros(9, 27, dtype=torch.int64, device=DEVICE)
    concentrated_RE[:, 4], concentrated_RE[:, 20] = most, most * 2 // 3
    check_kernel(concentrated_RE, 1, PACKS, threshold=0.0)


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", CloneAlgorithm)
def test_nothing_is_tried_while_no_rank_is_above_the_threshold(algorithm: CloneAlgorithm):
    """At the limit, and one token above it."""
    for most, moves in ((110, False), (111, True)):
        counts_RE = torch.zeros(4, 8, dtype=torch.int64, device=DEVICE)
        rest = 400 - most
        counts_RE[1] = torch.tensor([60, most - 60, 80, 20, 90, 10, rest - 240, 40], device=DEVICE)
        assert counts_RE.sum() == 400
        check_kernel(counts_RE, 1, algorithm, threshold=0.1)
        moved_S = plan_slots(counts_RE, 1, algorithm, threshold=0.1).moved_S
        assert moves == bool(moved_S.any())


@pytest.mark.full
@pytest.mark.parametrize("spares", chosen([1, 2], [2]))
def test_exact(spares: int):
    check_kernel(draw_counts(5, 3, 300, seed=spares), spares, SEARCHES, threshold=0.02 * spares)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("ranks", "local", "top_k", "most"),
    chosen(
        [(2, 3, 2, 12), (4, 1, 1, 9), (8, 2, 3, 5), (1, 4, 2, 3), (2, 2, 4, 0)],
        [(2, 3, 2, 12), (4, 1, 1, 9), (2, 2, 4, 0)],
    ),
)
def test_reroute(ranks: int, local: int, top_k: int, most: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.kernels.clones.reroute.PAIRS", 32)
    monkeypatch.setattr("app.kernels.expert_rows.WARP", 4)  # several blocks
    for seed in range(2):
        check_reroute_kernel(ranks, local, top_k, most, seed=seed)
