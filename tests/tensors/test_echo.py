"""Plans of clones against those of the source, and tokens that follow them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from app.choices import CloneAlgorithm
from app.moe.echo import plan_clones, reroute
from tests.echo_plans import (
    PACKS,
    STAYS_ABOVE,
    check_plan,
    draw_counts,
    draw_options,
    loads_after,
)
from tests.oracle import oracle

Json = dict[str, Any]
GOLDEN = oracle("echo")


def plan_of(case: Json) -> tuple[Tensor, Tensor, Tensor]:
    """Counts and plan of a golden case."""
    counts_RE = torch.tensor(case["counts"])
    plan = plan_clones(
        counts_RE, case["spare_per_rank"], case["algorithm"], case["threshold_multiplier"]
    )
    return counts_RE, *plan


@pytest.mark.parametrize("algorithm", [CloneAlgorithm.one_shot_greedy, PACKS])
def test_plans_equal_golden(algorithm: CloneAlgorithm):
    """To the token, those with equals too: they are taken in order of their index there as here."""
    cases = [case for case in GOLDEN["cases"] if case["algorithm"] == algorithm.value]
    assert len(cases) > 15
    for case in cases:
        counts_RE, moved_ES, moved_RS = plan_of(case)
        found = [[e, s, int(moved_ES[e, s])] for e, s in moved_ES.nonzero().tolist()]
        assert found == sorted(case["assignment"]), case
        assert moved_RS.tolist() == case["offload_to_spare"], case
        assert loads_after(counts_RE, moved_ES).tolist() == case["rank_load_after"]


def test_worked_examples_of_the_source():
    # loads [50, 100, 150, 200] and an average of 250 spill [0, 0, 50, 200]
    moved_ES, _ = plan_clones(torch.tensor([[50, 100, 150, 200, 0, 0, 0, 0], [0] * 8]), 2)
    assert moved_ES[:4, 2:].tolist() == [[0, 0], [0, 0], [0, 50], [200, 0]]
    # 83 of [30, 50, 20] are 24, 41 and 16 by proportion, then 2 more from the first
    counts_RE = torch.tensor([[30, 66, 0, 0, 83, 0], [50, 0, 0, 0, 0, 0], [20, 0, 0, 0, 0, 0]])
    _, moved_RS = plan_clones(counts_RE, 1)
    assert moved_RS.tolist() == [[0, 26, 0], [0, 41, 0], [0, 16, 0]]


def test_threshold_empties_slots_unless_a_rank_stays_above_it():
    counts_RE = torch.zeros(5, 15, dtype=torch.int64)
    counts_RE[0] = torch.tensor(STAYS_ABOVE)
    assert plan_clones(counts_RE, 1)[0].sum(dim=0).tolist() == [0, 0, 150, 130, 40]
    # at most 195: 200 stay on the first rank, so the 40 of the second, with 190, move too
    assert plan_clones(counts_RE, 1, threshold=0.3)[0].sum(dim=0).tolist() == [0, 0, 150, 130, 40]
    # at most 202
    assert plan_clones(counts_RE, 1, threshold=0.35)[0].sum(dim=0).tolist() == [0, 0, 150, 130, 0]


@pytest.mark.parametrize("case", GOLDEN["upstream_failures_on_cpu"], ids=["none", "small"])
def test_small_loads_where_the_source_divides_by_zero(case: Json):
    check_plan(*plan_of(case))


def test_what_cannot_be_planned_is_refused():
    counts_RE = torch.ones(2, 4, dtype=torch.int64)
    assert [error["error"]["type"] for error in GOLDEN["argument_errors"]] == ["ValueError"] * 2
    with pytest.raises(ValueError, match=r"spares_per_rank=2: .* nearest that works: 1"):
        plan_clones(counts_RE, 2, "approx_bin_packing")
    with pytest.raises(ValueError, match="algorithm='foo': must be one of one_shot_greedy, approx"):
        plan_clones(counts_RE, 1, "foo")
    with pytest.raises(ValueError, match=r"spares_per_rank=0: .* nearest that works: 1"):
        plan_clones(counts_RE, 0)
    with pytest.raises(ValueError, match="4 experts cannot be divided among 3 ranks"):
        plan_clones(counts_RE[:1].expand(3, 4), 1)


def test_no_plan_waits_for_the_device():
    for algorithm in CloneAlgorithm:
        with FakeTensorMode():
            counts_RE = torch.ones(4, 8, dtype=torch.int64)
            moved_ES, moved_RS = plan_clones(counts_RE, 1, algorithm, 0.1)
            reroute(torch.ones(5, 2, dtype=torch.int64), moved_ES, moved_RS, rank=1)


def test_enough_spares_leave_no_rank_above_the_average():
    for seed in range(10):
        counts_RE = draw_counts(4, 2, 500, seed=seed)
        moved_ES, _ = plan_clones(counts_RE, 8)
        average = int(counts_RE.sum()) // 4
        # what the average's rounding leaves has no room
        assert int(loads_after(counts_RE, moved_ES).max()) <= average + 3


def draw_choices(counts_E: Tensor, top_k: int, seed: int) -> Tensor:
    """Choices that have these counts where that is possible with ids that differ within a token,
    and are dropped (id E) elsewhere: T × K.
    """
    experts = len(counts_E)
    drawn = torch.Generator().manual_seed(seed)
    tokens = int(counts_E.max()) + 3
    free_T = torch.full((tokens,), top_k)
    chosen_TK = torch.full((tokens, top_k), experts)
    for expert, count in enumerate(counts_E.tolist()):
        order = (free_T + torch.rand(tokens, generator=drawn)).argsort(descending=True)[:count]
        order = order[free_T[order] > 0]
        free_T[order] -= 1
        chosen_TK[order, free_T[order]] = expert
    return chosen_TK.sort(dim=1).values


def home_of(ids_TK: Tensor, moved_ES: Tensor, ranks: int) -> Tensor:
    """The expert that each id computes, E for none."""
    experts, slots = moved_ES.shape
    local, spares = experts // ranks, slots // ranks
    home = torch.arange(experts).view(ranks, local)
    clone = (moved_ES > 0).long().argmax(dim=0).view(ranks, spares)
    table = torch.cat((home, clone), dim=1).flatten()
    return torch.cat((table, torch.tensor([experts])))[ids_TK]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("ranks", "local", "seed"),
    [(r, n, s) for s in range(8) for r, n in ((2, 4), (3, 1), (4, 5), (8, 2))],
)
def test_tokens_follow_the_plan(ranks: int, local: int, seed: int):
    wanted_RE = draw_counts(ranks, local, 40, seed=seed)
    experts = ranks * local
    chosen = [draw_choices(counts_E, 3, seed=seed) for counts_E in wanted_RE]
    counts_RE = torch.stack(
        [each.flatten().bincount(minlength=experts + 1)[:experts] for each in chosen]
    )
    spares, algorithm, threshold = draw_options(ranks, local, seed)
    moved_ES, moved_RS = plan_clones(counts_RE, spares, algorithm, threshold)
    check_plan(counts_RE, moved_ES, moved_RS, algorithm=algorithm)
    total = torch.zeros(ranks, local + spares, dtype=torch.int64)
    for rank, experts_TK in enumerate(chosen):
        ids_TK = reroute(experts_TK, moved_ES, moved_RS, rank)
        # the same experts at the same places, so probabilities need not move
        assert torch.equal(home_of(ids_TK, moved_ES, ranks), experts_TK)
        assert torch.equal(ids_TK, reroute(experts_TK, moved_ES, moved_RS, rank))
        kept = ids_TK.sort(dim=1).values
        assert ((kept.diff(dim=1) > 0) | (kept[:, 1:] == ranks * (local + spares))).all()
        columns = ids_TK.flatten().bincount(minlength=ranks * (local + spares) + 1)[:-1]
        columns = columns.view(ranks, -1)
        assert torch.equal(columns[:, local:].flatten(), moved_RS[rank])
        total += columns
    assert torch.equal(total.sum(dim=1), loads_after(counts_RE, moved_ES))


def test_the_first_tokens_move():
    moved_ES = torch.tensor([[0, 2], [0, 0]])
    moved_RS = torch.tensor([[0, 2], [0, 0]])
    experts_TK = torch.tensor([[1], [0], [0], [2], [0]])
    # rank 0 computes ids 0 (expert 0) and 1 (slot 0), rank 1 ids 2 and 3
    assert reroute(experts_TK, moved_ES, moved_RS, 0).flatten().tolist() == [2, 3, 3, 4, 0]
    assert reroute(experts_TK, moved_ES, moved_RS, 1).flatten().tolist() == [2, 0, 0, 4, 0]


def test_columns_equal_golden():
    cases = [case for case in GOLDEN["cases"] if "rerouted_col_sums" in case]
    assert len(cases) == 3
    for case in cases:
        counts_RE, moved_ES, moved_RS = plan_of(case)
        for rank, sums in enumerate(case["rerouted_col_sums"]):
            experts_T1 = torch.arange(case["num_experts"]).repeat_interleave(counts_RE[rank])
            ids_T1 = reroute(experts_T1[:, None], moved_ES, moved_RS, rank)
            assert ids_T1.flatten().bincount(minlength=len(sums)).tolist() == sums


def test_maps_and_probabilities_equal_golden():
    """Which tokens move is open in the source: sums over tokens of the map, and over columns of
    the probabilities.
    """
    for entry in GOLDEN["full_example"]:
        counts_RE = torch.tensor(entry["counts"])
        map_TE, probs_TE = (torch.tensor(entry[key]) for key in ("routing_map", "probs"))
        experts_TK = map_TE.nonzero()[:, 1].view(len(map_TE), 2)
        probs_TK = probs_TE.gather(1, experts_TK)
        ids_TK = reroute(experts_TK, *plan_clones(counts_RE, 1, PACKS), entry["rank"])
        golden_TC, columns = torch.tensor(entry["rerouted_map"]), len(entry["rerouted_map"][0])
        dense_TC = torch.zeros(len(map_TE), columns).scatter(1, ids_TK, probs_TK)
        assert torch.equal((dense_TC > 0).sum(dim=0), golden_TC.sum(dim=0))
        wanted_T = torch.tensor(entry["rerouted_probs"]).sum(dim=1)
        assert torch.equal((dense_TC > 0).sum(dim=1), golden_TC.sum(dim=1))
        torch.testing.assert_close(dense_TC.sum(dim=1), wanted_T)
