"""A plan as plain values: groups written out by hand, sums that must come out, and estimates
against arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest

from app.config import HardwareConfig
from app.plan.cost.flops import parameter_count
from app.plan.formatting import GIB
from app.plan.memory.overheads import MOST
from app.planner.export import SECTIONS, WHAT, Estimate, plan_json, stage_rows
from app.planner.plan import Plan
from app.planner.suggestion import Suggestion
from tests.actions import parse_action
from tests.config import load

DENSE = ("model=llama3_8b", "parallel.world_size=16", "parallel.tp=4", "parallel.pp=2")
EXPERTS = (
    "model=mixtral_8x7b",
    "parallel.world_size=16",
    "parallel.tp=4",
    "parallel.pp=2",
    "parallel.etp=1",
    "parallel.ep=4",
)
PIPELINE = ("model=dense_tiny", "parallel.pp=2", "parallel.vpp=2", "train.global_batch=64")


@functools.cache
def plan_of(*overrides: str) -> Plan:
    return Plan(load(*overrides))


def kinds(plan: Plan) -> dict[str, dict[str, object]]:
    return {kind["name"]: kind for kind in plan_json(plan, "groups")["groups"]["kinds"]}


def test_groups_of_16_ranks_with_tp_4_and_pp_2():
    found = kinds(plan_of(*DENSE))
    assert set(found) == {"tp", "pp", "dp_cp"}
    assert found["tp"]["members"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["dp_cp"]["members"] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [8, 12],
        [9, 13],
        [10, 14],
        [11, 15],
    ]
    assert found["pp"]["members"] == [[rank, rank + 8] for rank in range(8)]


def test_groups_of_the_same_with_etp_1_and_ep_4():
    found = kinds(plan_of(*EXPERTS))
    assert found["etp_ep"]["members"] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert found["edp"]["members"] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
        [8, 12],
        [9, 13],
        [10, 14],
        [11, 15],
    ]
    assert found["dp_cp"]["members"] == found["edp"]["members"]
    assert "etp" not in found
    assert (found["edp"]["groups"], found["edp"]["ranks"]) == (8, 2)


@pytest.mark.parametrize("what", WHAT)
def test_only_what_is_asked_for_and_plain_values(what: str):
    found = plan_json(plan_of(*PIPELINE), what)
    wanted = set(SECTIONS) if what == "all" else {what}
    assert set(found) == {"layout"} | wanted | ({"verdict"} if "memory" in wanted else set())
    assert json.loads(json.dumps(found)).keys() == found.keys()


def test_an_unknown_section_is_refused():
    with pytest.raises(ValueError, match="'stage' is none of groups, stages"):
        plan_json(plan_of("model=dense_tiny"), "stage")


def test_stages_hold_every_layer_and_parameter_once():
    plan = plan_of(*PIPELINE)
    rows = sorted(stage_rows(plan), key=lambda row: row.stage)
    assert [layer for row in rows for layer in row.layers] == list(range(plan.run.model.num_layers))
    assert [(row.embedding, row.head) for row in rows] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert [(row.pp_rank, row.chunk) for row in rows] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    count = parameter_count(plan.run.model)
    # tied: the head's stage has a copy
    assert sum(row.parameters for row in rows) == count.total + count.embedding
    assert plan_json(plan, "stages")["layout"]["parameters"]["per_rank"] == [
        sum(row.parameters for row in rows if row.pp_rank == rank) for rank in (0, 1)
    ]
    assert all(row.backward_seconds > row.forward_seconds > 0 for row in rows)


def test_moe_layers_are_named():
    plan = plan_of("model.moe.first_k_dense=1", "model.moe.every_n=2", "parallel.pp=2")
    assert [row.moe_layers for row in stage_rows(plan)] == [(1,), (3,)]


def test_a_rank_alone_reaches_the_efficiency_assumed():
    """No bubble, no traffic, nothing computed twice: MFU is the share of the peak that products
    reach.
    """
    plan = plan_of("model=dense_tiny", "hardware.efficiency=0.35", "hardware.peak_tflops=100")
    estimate = Estimate.of(plan)
    assert estimate.mfu == pytest.approx(0.35, rel=1e-9)
    assert (estimate.peak_tflops, estimate.efficiency, estimate.bubble_fraction) == (
        100,
        0.35,
        pytest.approx(0, abs=1e-12),
    )
    assert estimate.tokens_per_second_per_gpu * estimate.seconds == pytest.approx(16 * 128)


def test_tokens_are_shared_by_all_ranks():
    plan = plan_of("model=dense_tiny", "parallel.dp=2", "parallel.pp=2", "train.global_batch=64")
    estimate = Estimate.of(plan)
    assert estimate.tokens_per_second_per_gpu * estimate.seconds * 4 == pytest.approx(64 * 128)


def test_actions_can_be_read_back():
    plan = plan_of(*PIPELINE)
    texts = plan_json(plan, "schedule")["schedule"]["actions"]
    assert [[parse_action(word) for word in text.split()] for text in texts] == plan.actions


def test_memory_has_the_host_bytes_of_copies():
    plan = plan_of(*PIPELINE, "checkpoint.memory_every=2")
    found = [rank["host_copies"] for rank in plan_json(plan, "memory")["memory"]]
    assert found == [copies.held for copies in plan.host_copies] and all(found)


def test_memory_and_verdict():
    plan = plan_of(*PIPELINE, "hardware.gpu_memory_gib=0.5")
    advice = Suggestion(("parallel.dp=2",), 7, 1.5, cost="twice the GPUs")
    found = plan_json(plan, "memory", (advice,))
    totals = [sum(part["bytes"] for part in rank["parts"]) for rank in found["memory"]]
    assert (
        totals
        == [rank["total"] for rank in found["memory"]]
        == [rank.total for rank in plan.memory]
    )
    verdict = found["verdict"]
    assert (
        verdict["fits"] is False
        and verdict["needed"] == max(totals)
        and totals[verdict["pp_rank"]] == max(totals)
    )
    assert verdict["headroom"] == GIB // 2 - max(totals) < 0
    assert verdict["suggestions"] == [
        {"overrides": ("parallel.dp=2",), "memory": 7, "slowdown": 1.5, "cost": "twice the GPUs"}
    ]


def test_graphs():
    found = plan_json(plan_of(*PIPELINE, "cuda_graph=attn"), "graphs")["graphs"]
    assert (found["impl"], found["scope"]) == ("local", ["attn"])
    plan = plan_of(*PIPELINE, "cuda_graph=attn")
    assert len(found["ranks"]) == 2
    assert [rank["graphs"] for rank in found["ranks"]] == [
        graph.num_graphs for graph in plan.graphs if graph
    ]
    assert plan_json(plan_of("model=dense_tiny"), "graphs")["graphs"]["ranks"] == []


def test_advice_is_exported():
    plan = plan_of(*EXPERTS, "parallel.order=dp-tp-cp-ep-pp", "parallel.gpus_per_node=4")
    (advice,) = [a for a in plan_json(plan, "groups")["groups"]["advice"] if a["axis"] == "tp"]
    assert advice["nodes"] > advice["best_nodes"] == 1 and advice["seconds"] > 0


def staged(**hardware: float) -> tuple[list[bool], list[int]]:
    """Of each pipeline rank whether its copy is taken on the GPU first, and its total."""
    run = load("+experiment=smallmoe", "parallel.dp=2", "checkpoint.memory_every=40")
    plan = Plan(dataclasses.replace(run, hardware=HardwareConfig(**hardware)))
    return [rank.stages_copies for rank in plan.memory], [rank.total for rank in plan.memory]


def test_copies_are_taken_on_the_gpu_where_95_percent_hold_them():
    (yes,), (total,) = staged()
    assert yes
    least = total / MOST / GIB
    assert staged(gpu_memory_gib=least + 0.01) == ([True], [total])
    (no,), (without,) = staged(gpu_memory_gib=least - 0.01)
    assert not no and total - without == pytest.approx(1.1 * 10.1 * GIB, rel=0.1)
