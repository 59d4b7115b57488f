from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from app.choices import CpComm, DispatcherKind, Dtype, Recompute, Score
from app.config import (
    HardwareConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    Run,
    TrainConfig,
)
from app.errors import ConfigError
from app.plan.actions import Exchange
from app.plan.cost.traffic import (
    GroupTraffic,
    legal_orders,
    order_advice,
    parts_side_by_side,
    plan_traffic,
)
from app.plan.groups import GROUPS
from app.plan.layout import AXES, ParallelLayout, select_layout
from app.plan.nodes import NodeSpan, node_span
from app.plan.pipeline.lowering import lower_all
from app.plan.schedule import build_schedule
from app.plan.select import select_stages
from app.plan.stages import Stage, StagePlan
from app.rules import check

QWEN3_30B_A3B = ModelConfig(
    num_layers=48,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    qk_norm=True,
    moe=MoEConfig(num_experts=128, top_k=8, ffn_hidden_size=768),
)
DENSE = ModelConfig(
    num_layers=4, hidden_size=64, ffn_hidden_size=128, num_heads=4, num_kv_heads=4, vocab_size=256
)
MOE = dataclasses.replace(
    DENSE,
    tie_embeddings=True,
    moe=MoEConfig(
        num_experts=8,
        top_k=2,
        ffn_hidden_size=64,
        shared_ffn_hidden_size=64,
        shared_gate=True,
        every_n=2,
    ),
)
BF16 = PrecisionConfig(Dtype.bfloat16, Dtype.float32)
HARDWARE = HardwareConfig(node_gb_s=200, network_gb_s=50)


def planned(
    model: ModelConfig, world: int, microbatches: int = 4, seq_len: int = 64, **chosen: object
) -> Run:
    """A checked bf16 run of one sequence per microbatch; other keyword arguments are fields of
    `parallel`, or sections.
    """
    sections = {name: chosen.pop(name) for name in ("recompute", "schedule") if name in chosen}
    parallel = ParallelConfig(world_size=world, **chosen)
    dp = world // (parallel.tp * parallel.cp * parallel.pp)
    train = TrainConfig(seq_len=seq_len, micro_batch=1, global_batch=microbatches * dp)
    return check(Run(model, parallel, HARDWARE, precision=BF16, train=train, **sections))


def traffic_of(run: Run) -> dict[str, GroupTraffic]:
    found = plan_traffic(run, select_layout(run), select_stages(run))
    assert len({traffic.name for traffic in found}) == len(found)
    return {traffic.name: traffic for traffic in found}


WORLDS = [
    ParallelLayout(world, **degrees, order="-".join(order))
    for world, degrees in (
        (24, {"tp": 2, "cp": 3, "ep": 2, "etp": 2}),
        (32, {"tp": 4, "cp": 2, "pp": 2, "ep": 8, "etp": 1}),
    )
    for order in permutations(AXES)
    if order[-1] == "pp" or degrees.get("pp", 1) == 1
]


@pytest.mark.every(3)
@pytest.mark.parametrize("per_node", [1, 2, 3, 5, 6, 8, 12, 72])
def test_nodes_follow_from_sizes_and_strides(per_node: int):
    kinds = [
        (("tp",), False),
        (("cp",), False),
        (("dp", "cp"), False),
        (("pp",), False),
        (("ep",), True),
        (("etp",), True),
        (("edp",), True),
        (("tp", "dp"), False),
        (("etp", "ep", "pp"), True),
    ]
    for layout in WORLDS:
        for axes, expert in kinds:
            groups = [
                [rank // per_node for rank in group]
                for group in layout.groups(*axes, expert=expert)
            ]
            spans = NodeSpan(
                max(len(set(nodes)) for nodes in groups),
                min(nodes.count(node) for nodes in groups for node in nodes),
            )
            assert node_span(layout.sizes(expert), axes, per_node) == spans, (layout, axes)
        ends = [[rank // per_node for rank in group] for group in layout.embedding_groups()]
        found = node_span(layout.sizes(), ("pp",), per_node, ends_only=True)
        assert found.nodes == max(len(set(nodes)) for nodes in ends)
        assert found.near == min(nodes.count(nodes[0]) for nodes in ends)


def accepted(layout: ParallelLayout) -> Iterator[ParallelLayout]:
    """The layout in every order that the constructor takes."""
    for order in permutations(AXES):
        try:
            yield dataclasses.replace(layout, order="-".join(order))
        except ConfigError:
            continue


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(16, tp=2, cp=2, ep=4, etp=1),
        ParallelLayout(16, tp=2, cp=2, pp=2, ep=4, etp=1),
        ParallelLayout(16, tp=2, cp=2, pp=2, ep=2, etp=2),
        ParallelLayout(16, tp=4, pp=2, ep=4, etp=1),
        ParallelLayout(16, tp=2, pp=2, ep=4, etp=1),
        ParallelLayout(8, pp=8),
        ParallelLayout(12, tp=2, cp=2, pp=3, ep=4, etp=1, order="tp-CP-ep-pp"),
    ],
    ids=str,
)
def test_orders_are_those_that_a_layout_accepts(layout: ParallelLayout):
    assert ["-".join(order) for order in legal_orders(layout)] == [
        accepted.order for accepted in accepted(layout)
    ]


def worked_example() -> dict[str, tuple[int, int, int]]:
    """docs/planning.md, row by row from the sizes alone: bytes, most nodes spanned, bytes to
    other nodes.
    """
    hidden, layers = 8 * 4096 // 4 * 2048 * 2, 24
    rows = hidden * 8 * 3 // 2
    # norms, query and key norms, router; the last norm
    whole = layers * (2 * 2048 + 2 * 128 + 2048 * 128) + 2048
    attention = 2048 * 40 * 128 + 4096 * 2048
    dense = (layers * attention + 151936 * 2048) // 2 + whole
    experts = layers * 128 // 8 * 3 * 2048 * 768
    tensor = (5 * layers + 3) * hidden + 2 * whole * 4 // 2
    gradients, expert_gradients = dense * 6 * 15 // 16, experts * 6 * 3 // 4
    return {
        "tp": (tensor, 1, 0),
        "cp": (2 * layers * (8 * 4096 // 4) * 2 * 4 * 128 * 2, 1, 0),
        "etp_ep": (4 * layers * rows * 7 // 8, 1, 0),
        "pp": (hidden, 2, hidden),
        "dp_cp": (gradients, 4, gradients // 4),  # 4 of its 16 ranks in each node
        "edp": (expert_gradients, 4, expert_gradients),
    }


def example(**chosen: object) -> Run:
    run = planned(
        QWEN3_30B_A3B, 64, microbatches=8, seq_len=4096, tp=2, cp=2, pp=2, ep=8, etp=1, **chosen
    )
    return dataclasses.replace(run, hardware=HardwareConfig())


def test_the_worked_example():
    found, expected = traffic_of(example()), worked_example()
    assert {name: (t.bytes, t.nodes, t.bytes_across) for name, t in found.items()} == expected
    assert [found[name].exposed for name in found] == [True, True, True, False, False, False]
    assert {name: (t.groups, t.ranks) for name, t in found.items()} == {
        "tp": (32, 2),
        "cp": (32, 2),
        "etp_ep": (8, 8),
        "pp": (32, 2),
        "dp_cp": (4, 16),
        "edp": (16, 4),
    }
    for traffic in found.values():
        assert traffic.seconds == pytest.approx(
            max(traffic.bytes_inside / 280e9, traffic.bytes_across / 45e9)
        )


def test_the_documentation_states_it():
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    rows = re.findall(
        r"^\| (\w+) \| ([\d,]+) \| (\d+) \| ([\d,]+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    stated = {name: tuple(int(cell.replace(",", "")) for cell in cells) for name, *cells, _ in rows}
    assert stated == worked_example()
    seconds = {name: traffic.seconds for name, traffic in traffic_of(example()).items()}
    assert {name: float(ms) for name, *_, ms in rows} == {
        name: round(value * 1e3, 1) for name, value in seconds.items()
    }
    advice = order_advice(
        example(order="dp-tp-cp-ep-pp"), select_layout(example(order="dp-tp-cp-ep-pp"))
    )
    assert [(a.axis, a.nodes, a.best_nodes) for a in advice] == [("tp", 2, 1), ("etp_ep", 4, 1)]
    assert advice[0].order == "tp-cp-ep-dp-pp"
    assert advice[0].seconds == pytest.approx(0.616, abs=5e-4)


@pytest.mark.parametrize("per_node", [1, 2, 3, 5, 8, 64])
def test_an_all_to_all_crosses_for_every_rank_that_is_elsewhere(per_node: int):
    run = planned(MOE, 32, ep=8, tp=2, etp=1, gpus_per_node=per_node, order="tp-dp-ep-cp-pp")
    groups = [
        [rank // per_node for rank in group]
        for group in select_layout(run).groups("ep", expert=True)
    ]
    worst = max(sum(other != node for other in nodes) for nodes in groups for node in nodes)
    found = traffic_of(run)["etp_ep"]
    assert found.bytes_across == -(-found.bytes * worst // 7)


@pytest.mark.parametrize(
    ("per_node", "order"),
    [(1, "tp-dp"), (2, "tp-dp"), (4, "tp-dp"), (4, "dp-tp"), (8, "dp-tp"), (32, "tp-dp")],
)
def test_rings_leave_a_node_once_each(per_node: int, order: str):
    """All ranks together send over as many links between nodes as one ring has, which `near`
    rings share.
    """
    run = planned(DENSE, 32, tp=4, gpus_per_node=per_node, order=order)
    for name, found in traffic_of(run).items():
        group = [rank // per_node for rank in GROUPS[name].members(select_layout(run))[0]]
        crossings = sum(group[place] != group[place - 1] for place in range(len(group)))
        assert found.bytes_across * found.ranks == found.bytes * crossings


@pytest.mark.parametrize(
    ("per_node", "share"), [(1, 1), (2, 1), (4, 0.5), (8, 0.5), (16, 0), (32, 0)]
)
def test_pipelines_cross_between_neighbours(per_node: int, share: float):
    """Two tensor-parallel ranks, then eight pipeline ranks: [0, 2, …, 14]."""
    run = planned(
        dataclasses.replace(DENSE, num_layers=8),
        32,
        tp=2,
        pp=8,
        gpus_per_node=per_node,
        order="tp-cp-ep-pp-dp",
    )
    found = traffic_of(run)["pp"]
    assert found.bytes_across == share * found.bytes > -1
    assert (
        found.seconds == max(found.bytes_inside / 200e9, found.bytes_across / 50e9)
        and not found.exposed
    )


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (3, 4)])
def test_pipelines_send_what_their_lists_say(pp: int, vpp: int):
    model = dataclasses.replace(DENSE, num_layers=24)
    run = planned(model, 2 * pp, microbatches=2 * pp, tp=2, pp=pp, vpp=vpp)
    lists = lower_all(
        build_schedule("interleaved" if vpp > 1 else "1f1b", pp, 2 * pp, num_chunks=vpp)
    )
    sends = [
        sum(op.send for action in actions if isinstance(action, Exchange) for op in action.ops)
        for actions in lists
    ]
    assert traffic_of(run)["pp"].bytes == max(sends) * 64 // 2 * 64 * 2


def test_kinds_with_one_rank_or_nothing_to_send_are_left_out():
    assert traffic_of(planned(MOE, 1)) == {}
    assert list(traffic_of(planned(DENSE, 2))) == ["dp_cp"]
    assert list(traffic_of(planned(MOE, 2))) == ["dp_cp", "edp"]
    assert list(traffic_of(planned(MOE, 2, ep=2))) == ["etp_ep", "dp_cp"]
    # the two ranks that share every expert
    assert list(traffic_of(planned(MOE, 2, tp=2))) == ["tp", "etp_ep"]
    assert list(traffic_of(planned(MOE, 2, etp=2))) == ["etp_ep", "dp_cp"]
    assert list(traffic_of(planned(MOE, 8, tp=2, pp=2, ep=4, etp=1))) == [
        "tp",
        "etp_ep",
        "pp",
        "embedding",
        "dp_cp",
    ]


def test_stages_in_a_v_meet_on_one_rank():
    """The first rank holds the first and the last stage, the second one those between: two
    borders, no copy of the table.
    """
    run = planned(MOE, 4, pp=2, tp=2, etp=1)
    first = Stage((0,), True, False), Stage((3,), False, True)
    between = Stage((1,), False, False), Stage((2,), False, False)
    in_v = plan_traffic(run, select_layout(run), StagePlan((first, between)))
    assert [traffic.name for traffic in in_v] == ["tp", "pp", "edp"]
    assert in_v[1].bytes == 2 * HIDDEN // 2


def test_tied_embeddings_are_summed_over_the_ends_of_a_pipeline():
    run = planned(MOE, 16, tp=2, pp=4, gpus_per_node=8, etp=1)
    found = traffic_of(run)["embedding"]
    assert (found.groups, found.ranks, found.nodes, found.exposed) == (4, 2, 2, True)
    shard = 256 * 64 // (2 * 2)  # tp = 2, dp = 2
    assert found.bytes == found.bytes_across == shard * 4
    untied = dataclasses.replace(MOE, tie_embeddings=False)
    assert "embedding" not in traffic_of(planned(untied, 16, tp=2, pp=4, etp=1))


# One sequence of 64 tokens of width 64 in bf16 per microbatch, four microbatches; layers 0 and 2
# have experts.
HIDDEN = 4 * 64 * 64 * 2
BLOCKS = 4 + 2 + 2  # attention, dense feed-forwards, shared experts
WHOLE = 4 * 2 * 64 + 2 * (8 * 64 + 64) + 64  # norms, routers, gates, last norm


@pytest.mark.parametrize(
    ("choice", "blocks", "keys", "rows"),
    [
        (RecomputeConfig(), 0, 0, 0),
        (
            RecomputeConfig(phases=(Recompute.norm, Recompute.mlp_act, Recompute.experts_act)),
            0,
            0,
            0,
        ),
        (RecomputeConfig(phases=(Recompute.attn_core,)), 0, 4, 0),
        (RecomputeConfig(phases=(Recompute.shared,)), 2, 0, 0),
        (RecomputeConfig(phases=(Recompute.moe,)), 2, 0, 2),
        (RecomputeConfig(full=True), BLOCKS, 4, 2),
    ],
    ids=str,
)
def test_recomputation_repeats_what_forward_sends(
    choice: RecomputeConfig, blocks: int, keys: int, rows: int
):
    found = traffic_of(planned(MOE, 8, tp=2, cp=2, ep=2, recompute=choice))
    hidden = HIDDEN // 4
    assert found["tp"].bytes == (5 * BLOCKS + 2 * blocks + 2 + 3) * hidden + 2 * WHOLE * 4 // 2
    # as many key and value heads as query heads
    assert found["cp"].bytes == (2 * 4 + keys) * hidden * 2
    sent = 2 * 2 * hidden * 3 // 2  # two experts per token, each on two ranks, load 1.5
    assert (
        found["etp_ep"].bytes == (4 * 2 + 2 * rows) * sent * 3 // 4 and found["etp_ep"].ranks == 4
    )
    traded = traffic_of(
        planned(MOE, 8, tp=2, cp=2, ep=2, cp_comm_type=CpComm.all_to_all, recompute=choice)
    )["cp"]
    # queries, keys, values out and results back, a half of each
    assert traded.bytes == (2 * 4 + keys) * 4 * hidden // 2

    def exchanged(kind: DispatcherKind) -> GroupTraffic:
        moe = dataclasses.replace(MOE, moe=dataclasses.replace(MOE.moe, dispatcher=kind))
        return traffic_of(planned(moe, 8, tp=2, cp=2, ep=2, recompute=choice))["etp_ep"]

    tokens, gathered = 4 * 64 // 4, exchanged(DispatcherKind.all_gather)
    # sums are fp32
    forward, backward = tokens * (64 * (2 + 4) + 2 * (8 + 4)), tokens * (64 * (2 + 4) + 2 * 4)
    assert gathered.bytes == ((2 + rows) * forward + 2 * backward) * 3 and gathered.ranks == 4
    # tokens and their sums; ids and probabilities, and these again with their gradients
    forward, backward = tokens * (2 * 64 * 2 + 2 * (2 + 4)), tokens * (2 * 64 * 2 + 2 * (4 + 4))
    sent = exchanged(DispatcherKind.static)
    assert sent.bytes == ((2 + rows) * forward + 2 * backward) * 3 and sent.ranks == 4


def test_more_ranks_send_more_of_less():
    """n − 1 of n parts leave a rank, whatever is cut over how many."""
    tensor = [traffic_of(planned(DENSE, tp, tp=tp))["tp"].bytes for tp in (2, 4)]
    whole = (4 * 2 + 1) * 64 * 4 * 2
    assert [sent - whole * (tp - 1) // tp for sent, tp in zip(tensor, (2, 4), strict=True)] == [
        (5 * 8 + 5) * HIDDEN // 2,
        (5 * 8 + 5) * HIDDEN * 3 // 4,
    ]
    rows = [traffic_of(planned(MOE, ep, ep=ep))["etp_ep"].bytes for ep in (2, 4, 8)]
    assert rows == [4 * 2 * 2 * HIDDEN * 3 // 2 * (ep - 1) // ep for ep in (2, 4, 8)]
    # to every rank of an expert
    shared = [traffic_of(planned(MOE, 4, ep=ep, etp=4 // ep))["etp_ep"].bytes for ep in (1, 2)]
    assert shared == [4 * 2 * 2 * HIDDEN * 4 * 3 // 4, 4 * 2 * 2 * HIDDEN * 3 // 2 * 2 * 3 // 4]
    filled = dataclasses.replace(
        MOE, moe=dataclasses.replace(MOE.moe, capacity_factor=1.25, pad_to_capacity=True)
    )
    # 20 of 16 rows each
    assert (
        traffic_of(planned(filled, 4, ep=4))["etp_ep"].bytes == 4 * 2 * 2 * HIDDEN * 5 // 4 * 3 // 4
    )
    even = dataclasses.replace(MOE, moe=dataclasses.replace(MOE.moe, planned_imbalance=1.0))
    assert traffic_of(planned(even, 4, ep=4))["etp_ep"].bytes == 4 * 2 * 2 * HIDDEN * 3 // 4


def test_gradients_resumece_per_step_in_their_own_type():
    dense = traffic_of(planned(DENSE, 4))["dp_cp"]
    elements = 2 * 256 * 64 + 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert dense.bytes == elements * 3 // 4 * (4 + 2)
    assert dense == traffic_of(planned(DENSE, 4, microbatches=32))["dp_cp"]
    in_bf16 = dataclasses.replace(
        planned(DENSE, 4), precision=PrecisionConfig(Dtype.bfloat16, Dtype.bfloat16)
    )
    assert traffic_of(in_bf16)["dp_cp"].bytes == elements * 3 // 4 * 4


def test_the_busiest_pipeline_rank_counts():
    run = planned(DENSE, 8, pp=2, tp=2, first=3)
    assert traffic_of(run)["tp"].bytes == (5 * 6 + 2) * HIDDEN // 2 + 2 * (3 * 2 * 64) * 4 // 2
    assert (
        traffic_of(run)["dp_cp"].bytes
        == (256 * 64 // 2 + 3 * ((4 * 64 * 64 + 3 * 64 * 128) // 2 + 2 * 64)) // 2 * 6
    )


def exposed(run: Run, order: str) -> float:
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, order=order))
    return sum(traffic.seconds for traffic in traffic_of(run).values() if traffic.exposed)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("model", "world", "degrees"),
    [
        (DENSE, 32, {"tp": 4, "order": "dp-tp"}),
        (MOE, 32, {"tp": 2, "ep": 4, "etp": 1, "order": "dp-ep-tp"}),
        (MOE, 32, {"tp": 2, "ep": 4, "etp": 1, "order": "ep-dp-tp"}),
        (MOE, 32, {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "etp": 1, "order": "pp-dp-cp-ep-tp"}),
        (MOE, 32, {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 2, "order": "dp-pp-cp-tp-ep"}),
        (MOE, 64, {"tp": 4, "pp": 2, "ep": 8, "etp": 1, "order": "dp-cp-tp-ep-pp"}),
        (
            MOE,
            48,
            {"tp": 2, "pp": 2, "ep": 4, "etp": 1, "order": "cp-dp-ep-tp-pp", "gpus_per_node": 6},
        ),
    ],
    ids=[
        "dense",
        "order of three",
        "tp alone",
        "pipelines first",
        "same grids",
        "wide",
        "six per node",
    ],
)
def test_advice_is_the_best_of_all_orders(model: ModelConfig, world: int, degrees: dict):
    run = planned(model, world, **degrees)
    layout = select_layout(run)
    allowed = [
        other.order
        for other in accepted(layout)
        if parts_side_by_side(other, other.order.split("-"))
    ]
    seconds = {order: exposed(run, order) for order in allowed}
    advice = order_advice(run, layout)
    assert advice
    now, then = (
        traffic_of(run),
        traffic_of(planned(model, world, **(degrees | {"order": advice[0].order}))),
    )
    for one in advice:
        assert seconds[one.order] == min(seconds.values())
        assert (
            one.seconds == pytest.approx(exposed(run, run.parallel.order) - seconds[one.order])
            and one.seconds > 0
        )
        assert (one.nodes, one.best_nodes) == (now[one.axis].nodes, then[one.axis].nodes)
    fewer = [
        name for name in ("tp", "etp_ep") if name in now and then[name].nodes < now[name].nodes
    ]
    assert [one.axis for one in advice] == fewer


def test_advice_keeps_the_present_order_where_it_can():
    run = planned(DENSE, 32, tp=4, cp=2, order="cp-dp-ep-tp-pp")
    assert [one.order for one in order_advice(run, select_layout(run))] == ["cp-tp-dp-ep-pp"]


@pytest.mark.parametrize(
    "chosen",
    [
        {"tp": 4},
        {"tp": 4, "gpus_per_node": 2},
        {"tp": 4, "order": "dp-tp", "gpus_per_node": 1},
        {"order": "dp-tp"},
        {"tp": 4, "order": "dp-tp", "gpus_per_node": 32},
        {"tp": 2, "pp": 2, "order": "tp-dp-pp"},
        {"tp": 2, "cp": 2, "order": "tp-cp-ep-dp-pp", "gpus_per_node": 2},
    ],
    ids=str,
)
def test_no_advice_where_nothing_helps(chosen: dict):
    run = planned(DENSE, 32, **chosen)
    assert order_advice(run, select_layout(run)) == ()


def test_a_large_world_is_planned_at_once():
    model = ModelConfig(
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=129280,
        moe=MoEConfig(
            256, 8, 2048, first_k_dense=3, shared_ffn_hidden_size=2048, score=Score.sigmoid
        ),
    )
    layout = "E" + "tttt|" * 15 + "tL"
    for per_node in (8, 72):
        degrees = {
            "tp": 2,
            "cp": 4,
            "pp": 16,
            "ep": 8,
            "etp": 1,
            "layout": layout,
            "order": "pp-dp-cp-ep-tp",
        }
        run = planned(model, 10240, 16, 4096, **degrees, gpus_per_node=per_node)
        grids, stages = select_layout(run), select_stages(run)
        start = time.process_time()
        traffic, advice = plan_traffic(run, grids, stages), order_advice(run, grids)
        assert time.process_time() - start < 0.3
        assert len(traffic) == 6 and [one.axis for one in advice] == ["tp", "etp_ep"]


@pytest.mark.parametrize("rank", [24, None])
def test_latent_attention_gathers_latents_and_the_rotary_key(rank: int | None):
    """And over cp all heads, values as wide as keys: what docs/planning.md says, in 4 layers of 4
    heads of 8 + 4, 4 microbatches of 64 tokens.
    """
    mla = MLAConfig(rank, 16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    model = dataclasses.replace(DENSE, mla=mla)
    tokens = 4 * 64 // 2
    queries = 3 * (rank or 64)
    attention = tokens * 2 * (queries + 3 * 16 + 2 * 4 + 2 * 64)
    others = tokens * 2 * 64 * 5
    whole = 4 * (2 * 64 + (rank or 0) * 65 + 20 * 64 + 16) + 64  # elements, of gradients in fp32
    found = traffic_of(planned(model, 2, tp=2))["tp"]
    assert found.bytes == 4 * (attention + others) + others + whole * 4
    cp = traffic_of(planned(model, 2, cp=2))["cp"]
    assert cp.bytes == 4 * 2 * tokens * 2 * 4 * 12 * 2
