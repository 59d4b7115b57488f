from __future__ import annotations

import json
import time
from itertools import chain, permutations
from math import prod

import pytest

from app.errors import ConfigError
from app.plan.layout import ParallelLayout, axis_groups
from tests.cases import each
from tests.oracle import oracle

# Megatron-Core 0.16.1
GOLDEN = oracle("groups")
DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
EXPERT = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
NAMED = {  # groups of the golden file that are plain groups of one grid: name -> axes, expert
    "tp": ("tp", False),
    "cp": ("cp", False),
    "dp": ("dp", False),
    "pp": ("pp", False),
    "dp-cp": ("dp-cp", False),
    "tp-pp": ("tp-pp", False),
    "tp-cp": ("tp-cp", False),
    "tp-dp": ("tp-dp", False),
    "tp-dp-cp": ("tp-dp-cp", False),
    "ep": ("ep", True),
    "expt_tp": ("tp", True),
    "expt_dp": ("dp", True),
    "expt_tp-ep": ("tp-ep", True),
    "expt_tp-ep-pp": ("tp-ep-pp", True),
}
# learned position embeddings, hierarchical context parallelism, partly sharded optimizer state
OTHERS = {"pos_embd", "intra_dp-cp", "intra_expt_dp", "inter_dist_opt", "intra_dist_opt"}
COORDS = {
    "tp": ("tp", False),
    "cp": ("cp", False),
    "dp": ("dp", False),
    "pp": ("pp", False),
    "dp_cp": ("dp-cp", False),
    "ep": ("ep", True),
    "expt_tp": ("tp", True),
    "expt_dp": ("dp", True),
    "expt_tp_ep": ("tp-ep", True),
}


def name_of(case: dict) -> str:
    return json.dumps(case["args"])


def layout_of(args: dict) -> ParallelLayout:
    named = {
        key: value for key, value in args.items() if key in ("tp", "cp", "pp", "ep", "etp", "order")
    }
    return ParallelLayout(args["world"], **named)


def token_groups(layout: ParallelLayout, token: str, expert: bool) -> list[list[int]]:
    names = EXPERT if expert else DENSE
    return layout.groups(*(names[axis] for axis in token.split("-")), expert=expert)


@each(GOLDEN["cases"])
def test_groups_equal_the_golden_ones(case: dict):
    layout = layout_of(case["args"])
    assert {"dense_dp": layout.dp, "expt_dp": layout.edp} == case["derived"]
    found = {name: token_groups(layout, *NAMED[name]) for name in NAMED}
    found["embd"] = layout.embedding_groups()
    assert found == {name: groups for name, groups in case["groups"].items() if name not in OTHERS}


@each(case for case in GOLDEN["cases"] if "rank_generator" in case)
def test_any_set_of_axes_equals_the_golden_groups(case: dict):
    layout = layout_of(case["args"])
    for name, groups in case["rank_generator"].items():
        grid, token = name.split(":")
        assert token_groups(layout, token, grid == "expert") == groups, name


@each(case for case in GOLDEN["cases"] if "coords" in case)
def test_coordinates_equal_the_golden_ones(case: dict):
    layout, golden = layout_of(case["args"]), case["coords"]
    for name, (token, expert) in COORDS.items():
        for group in token_groups(layout, token, expert):
            assert [golden[name][rank] for rank in group] == list(range(len(group))), name
    for name in ("tp", "cp", "dp", "pp"):
        assert [layout.coords(rank)[name] for rank in range(layout.world_size)] == golden[name]
    for name, axis in (("ep", "ep"), ("expt_tp", "etp"), ("expt_dp", "edp")):
        assert [
            layout.coords(rank, expert=True)[axis] for rank in range(layout.world_size)
        ] == golden[name]
    ends = {rank for group in layout.embedding_groups() for rank in group}
    assert [int(rank in ends) for rank in range(layout.world_size)] == golden["in_embd"]


# Chunks (vpp) belong to the schedule: test_schedule has that refusal.
REFUSED = [
    case
    for case in GOLDEN["invalid"] + GOLDEN["accepted_oddities"]
    if not {"vpp", "hcp"} & set(case["args"])
]


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_refuses_what_cannot_be_laid_out(case: dict):
    args = case["args"]
    with pytest.raises(ValueError):
        layout_of(args)


def test_masked_groups_equal_the_golden_ones():
    for case in GOLDEN["masked_groups"]:
        assert (
            axis_groups(case["shape"], {axis for axis, kept in enumerate(case["mask"]) if kept})
            == case["groups"]
        )


def test_dense_worked_example():
    layout = ParallelLayout(16, tp=4, pp=2)
    assert layout.groups("dp") == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [8, 12],
        [9, 13],
        [10, 14],
        [11, 15],
    ]
    assert layout.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.groups("pp") == [[rank, rank + 8] for rank in range(8)]


def test_expert_worked_example():
    layout = ParallelLayout(16, tp=4, pp=2, ep=4, etp=1)
    assert layout.edp == 2
    assert layout.groups("ep", expert=True) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert layout.groups("edp", expert=True)[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for rank in range(16):  # the stride of edp_rank is etp·ep
        at = layout.coords(rank, expert=True)
        assert rank == at["etp"] + at["ep"] * 1 + at["edp"] * 1 * 4 + at["pp"] * 1 * 4 * 2


def test_folding_shares_ranks_between_cp_and_ep():
    layout = ParallelLayout(8, cp=8, ep=8)
    assert layout.groups("cp") == layout.groups("ep", expert=True) == [list(range(8))]


@each("-".join(order) for order in permutations(["tp", "cp", "ep", "dp"]))
def test_every_order_partitions_the_world(order: str):
    layout = ParallelLayout(48, tp=2, cp=2, pp=3, ep=2, etp=2, order=f"{order}-pp")
    for expert in (False, True):
        sizes = layout.sizes(expert)
        assert prod(sizes.values()) == 48
        for axis, size in sizes.items():
            groups = layout.groups(axis, expert=expert)
            assert {len(group) for group in groups} == {size}
            assert sorted(chain(*groups)) == list(range(48))
            for group in groups:
                assert [layout.coords(rank, expert)[axis] for rank in group] == list(range(size))
    assert layout.groups("pp") == layout.groups("pp", expert=True)


def test_order_of_the_arguments_does_not_matter():
    layout = ParallelLayout(16, tp=2, cp=2, pp=2)
    assert layout.groups("dp", "cp") == layout.groups("cp", "dp")
    assert layout.groups() == [[rank] for rank in range(16)]


def test_axes_may_be_left_out_of_the_order_only_at_size_one():
    assert ParallelLayout(8, tp=2, order="dp-tp").groups("tp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ParallelLayout(8, tp=2, order="TP-DP").groups("cp") == [[rank] for rank in range(8)]
    with pytest.raises(ConfigError, match="leaves out ep, which has 2 ranks"):
        ParallelLayout(8, ep=2, order="tp-cp-dp-pp")


def test_pipelines_of_dense_and_expert_layers_must_agree():
    # dp = edp, and the pipelines agree
    assert ParallelLayout(16, tp=2, pp=2, ep=2, etp=1, order="tp-cp-ep-pp-dp").dp == 4
    with pytest.raises(ConfigError, match="get different pipelines"):
        ParallelLayout(16, tp=2, cp=2, pp=2, etp=4, order="tp-pp-cp-ep-dp")
    with pytest.raises(ConfigError, match="needs dp = edp"):
        ParallelLayout(16, tp=2, cp=2, pp=2, order="tp-pp-cp-ep-dp")


def test_refusals_name_numbers_and_the_nearest_that_works():
    with pytest.raises(ConfigError, match=r"tp × cp × pp = 3 × 1 × 2 = 6; did you mean 6 or 12\?"):
        ParallelLayout(8, tp=3, pp=2)
    with pytest.raises(ConfigError, match="did you mean tp-dp"):
        ParallelLayout(8, tp=2, order="tp-tp-dp")
    with pytest.raises(ValueError, match="dense grid has no axis 'ep'; it has tp, cp, dp, pp"):
        ParallelLayout(8, ep=2).groups("ep")
    with pytest.raises(ValueError, match="rank 8 is outside the world of 8"):
        ParallelLayout(8).coords(8)


def test_ten_thousand_ranks_take_well_under_a_second():
    start = time.process_time()
    layout = ParallelLayout(10_240, tp=8, cp=2, pp=8, ep=16, etp=1)
    dense = [
        layout.groups(*axes)
        for axes in (["tp"], ["cp"], ["dp"], ["pp"], ["dp", "cp"], ["tp", "pp"])
    ]
    expert = [layout.groups(axis, expert=True) for axis in ("etp", "ep", "edp")]
    assert all(sum(map(len, groups)) == 10_240 for groups in dense + expert)
    assert len({tuple(layout.coords(rank).values()) for rank in range(10_240)}) == 10_240
    assert time.process_time() - start < 1.0
