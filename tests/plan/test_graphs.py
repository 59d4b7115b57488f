from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from app.plan import select
from app.plan.actions import Action, Backward, BackwardWeight, Compute, Forward
from app.plan.graphs import GraphPlan, PoolOrder, check_graphs, for_transformer_engine, plan_graphs
from app.plan.pipeline.lowering import lower_all
from app.plan.schedule import build_schedule, peak_in_flight, signed_order, warmup_count
from app.planner.plan import Plan
from tests.actions import parse_action
from tests.cases import each
from tests.config import load

LAYOUTS = [
    (name, pp, mbs, 1)
    for name in ("gpipe", "1f1b", "zero_bubble_h1")
    for pp in (2, 3, 4, 8)
    for mbs in (1, 2, 5, 8, 12)
]
LAYOUTS += [
    ("interleaved", pp, rounds * pp, chunks)
    for pp in (2, 3, 4)
    for rounds in (1, 2, 3)
    for chunks in (1, 2, 3)
]


def owners(actions: Sequence[Action], plan: GraphPlan) -> list[dict[int, tuple[int, int]]]:
    """After each compute action, who owns which slot; AssertionError if one has two owners."""
    split = any(isinstance(action, BackwardWeight) for action in actions)
    held: dict[int, tuple[int, int]] = {}
    history = []
    for action in actions:
        match action:
            case Forward(mb, chunk):
                assert held.setdefault(plan.slot_of(mb, chunk), (mb, chunk)) == (mb, chunk)
            case Backward(mb, chunk) | BackwardWeight(mb, chunk):
                assert held.pop(plan.slot_of(mb, chunk)) == (mb, chunk)
        history.append(dict(held))
    assert not held, "left over" if split else "a forward without backward"
    return history


def peak_of(actions: Sequence[Action], chunk: int) -> int:
    return peak_in_flight(
        [action for action in actions if isinstance(action, Compute) and action.chunk == chunk]
    )


def test_counts_of_the_sources():
    alone = build_schedule("none", 1, 8)[0]
    assert (
        plan_graphs(alone, [32]).num_graphs == plan_graphs(alone, [32], "slot").num_graphs == 2 * 32
    )
    first, *_, last = build_schedule("1f1b", 4, 8)
    assert plan_graphs(last, [8]).num_graphs == plan_graphs(last, [8], "slot").num_graphs == 2 * 8
    assert plan_graphs(first, [8]).num_graphs == 2 * 8 * 8
    assert plan_graphs(first, [8], "slot").num_graphs == 2 * 8 * 4
    assert plan_graphs(first, [8]).num_slots == plan_graphs(first, [8], "slot").num_slots == 4
    all_first = build_schedule("gpipe", 1, 4)[0]  # four forwards, then four backwards
    assert plan_graphs(all_first, [5]).num_graphs == 2 * 5 * 4
    interleaved = build_schedule("interleaved", 4, 8, num_chunks=2)[0]
    assert plan_graphs(interleaved, [4, 4]).num_graphs == 2 * 8 * 8
    assert plan_graphs(interleaved, [4, 4]).num_slots == (4 - 0 - 1) * 2 + (2 - 1) * 4 + 1
    slots = [peak_of(interleaved, chunk) for chunk in (0, 1)]
    assert plan_graphs(interleaved, [4, 3], "slot").num_graphs == 2 * (4 * slots[0] + 3 * slots[1])
    assert plan_graphs(interleaved, [4, 3], "slot").num_slots == sum(slots)


def test_split_backward_has_three_graphs_and_forward_only_one():
    assert plan_graphs(build_schedule("zero_bubble_h1", 2, 4)[0], [3]).num_graphs == 3 * 3 * 4
    assert (
        plan_graphs(
            build_schedule("interleaved", 2, 4, num_chunks=2, forward_only=True)[0], [3, 2]
        ).num_graphs
        == 3 + 2
    )


@each(LAYOUTS)
def test_slots_have_one_owner_and_are_as_many_as_the_peak(
    name: str, pp: int, mbs: int, chunks: int
):
    layers = list(range(1, chunks + 1))
    for rank, actions in enumerate(build_schedule(name, pp, mbs, num_chunks=chunks)):
        peak = peak_in_flight(actions)
        if name in ("1f1b", "interleaved"):
            group = pp if name == "interleaved" else None
            assert peak == min(
                mbs * chunks, warmup_count(pp, rank, mbs, num_chunks=chunks, group_size=group) + 1
            )
        shared, own = plan_graphs(actions, layers), plan_graphs(actions, layers, "slot")
        assert max(map(len, owners(actions, shared))) == shared.num_slots == peak
        owners(actions, own)
        kinds = 3 if name.startswith("zero") else 2
        peaks = [peak_of(actions, chunk) for chunk in range(chunks)]
        assert own.num_slots == (1 if peak == 1 else sum(peaks))
        assert shared.num_graphs == kinds * sum(layers) * (1 if peak == 1 else mbs)
        assert own.num_graphs == kinds * sum(
            n * slots for n, slots in zip(layers, peaks, strict=True)
        )
        assert own.num_static_inputs == sum(
            n * slots for n, slots in zip(layers, peaks, strict=True)
        )


def test_slots_are_reused_first_in_first_out():
    text = "F0.0 F1.0 F0.1 B1.0 B0.1 F1.1 F2.0 B0.0 B1.1 B2.0"
    plan = plan_graphs([parse_action(word) for word in text.split()], [1, 1])
    assert [plan.slot_of(*place) for place in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0))] == [
        0,
        1,
        2,
        1,
        2,
    ]
    assert plan.num_slots == 3 and plan.num_static_inputs == 3


def test_static_inputs_do_not_grow_with_the_microbatches():
    for key in ("microbatch", "slot"):
        plans = [
            plan_graphs(build_schedule("interleaved", 4, mbs, num_chunks=2)[1], [3, 3], key)
            for mbs in (8, 16, 32)
        ]
        assert len({plan.num_static_inputs for plan in plans}) == 1
        assert len({plan.num_graphs for plan in plans}) == (1 if key == "slot" else 3)


@each(LAYOUTS)
def test_transformer_engine_is_told_the_order_of_the_list(
    name: str, pp: int, mbs: int, chunks: int
):
    layers = list(range(1, chunks + 1))
    for actions in build_schedule(name, pp, mbs, num_chunks=chunks):
        if name.startswith("zero"):
            with pytest.raises(ValueError, match="is half a backward"):
                for_transformer_engine(plan_graphs(actions, layers), actions)
            continue
        shared, own = (
            for_transformer_engine(plan_graphs(actions, layers, key), actions)
            for key in ("microbatch", "slot")
        )
        (whole,) = shared.orders.values()
        once = shared.num_slots == 1
        every = range(1 if once else mbs)
        assert whole.firsts == (tuple(every),) * chunks
        assert list(whole.order) == ([1, -1] if once else signed_order(actions))
        # every set of a slot is captured by itself
        orders = [each.order for each in own.orders.values()]
        assert orders == [(1, -1)] * own.num_slots
        for plan in (shared, own):
            sets = sum(
                len(firsts) * layers[chunk]
                for order in plan.orders.values()
                for chunk, firsts in zip(order.chunks, order.firsts, strict=True)
            )
            assert plan.copy_sent and plan.num_graphs == 2 * sets


def test_transformer_engine_gives_each_layer_in_flight_an_input():
    text = "F0.0 F1.0 F0.1 B0.1 B0.0 F1.1 B1.1 B1.0"
    actions = [parse_action(word) for word in text.split()]
    plan = for_transformer_engine(plan_graphs(actions, [3, 2], own_inputs=[[0], [0]]), actions)
    # two microbatches in the first chunk and one in the second
    assert plan.num_static_inputs == 3 + 3 + 2
    assert plan.orders == {0: PoolOrder((0, 1), ((0, 1), (0, 1)), (1, 1, 2, -2, -1, 2, -2, -1))}
    without = for_transformer_engine(plan_graphs(actions, [3, 0]), actions)
    assert without.orders == {0: PoolOrder((0,), ((0, 1),), (1, 1, -1, -1))}
    nothing = for_transformer_engine(plan_graphs(actions, [0, 0]), actions)
    assert not nothing.orders and nothing.num_static_inputs == nothing.num_graphs == 0


def test_te_graphs_refuse_reordered_backwards():
    actions = [parse_action(word) for word in ("F0.0", "F1.0", "B1.0", "B0.0")]
    with pytest.raises(ValueError, match=r"backwards of microbatches \[\(1, 0\)\] after forwards"):
        for_transformer_engine(plan_graphs(actions, [2]), actions)


@each(LAYOUTS)
def test_no_replay_writes_over_what_is_needed(name: str, pp: int, mbs: int, chunks: int):
    for forward_only in (False, True):
        schedule = build_schedule(name, pp, mbs, num_chunks=chunks, forward_only=forward_only)
        for key, lists in product(
            ("microbatch", "slot"),
            (schedule, lower_all(schedule), lower_all(schedule, overlap=False)),
        ):
            for actions, computes in zip(lists, schedule, strict=True):
                plan = plan_graphs(actions, [1] * chunks, key)
                assert plan == plan_graphs(computes, [1] * chunks, key)
                check_graphs(actions, plan)


@each(LAYOUTS)
def test_check_graphs_finds_slots_reused_in_a_shared_pool(
    name: str, pp: int, mbs: int, chunks: int
):
    """With no more microbatches than ranks, a reused slot of an interleaved list meets only
    those that it met before.
    """
    for actions in lower_all(build_schedule(name, pp, mbs, num_chunks=chunks)):
        plan = plan_graphs(actions, [1] * chunks, "slot")
        if 1 < plan.num_slots < mbs * chunks and not (name == "interleaved" and mbs == pp):
            with pytest.raises(
                ValueError,
                match=r"writes .* of microbatch \d+ in chunk \d+ where .* is still needed",
            ):
                check_graphs(actions, replace(plan, pool_per_slot=False))


@pytest.mark.parametrize(("pp", "mbs"), list(product((2, 4), (6, 9))))
def test_one_slot_less_is_caught(pp: int, mbs: int):
    for key, actions in product(
        ("microbatch", "slot"), lower_all(build_schedule("1f1b", pp, mbs))[:-1]
    ):
        plan = plan_graphs(actions, [1], key)
        fewer = {place: slot % (plan.num_slots - 1) for place, slot in plan.slots.items()}
        with pytest.raises(
            ValueError,
            match=r"F\d\.0 writes input of microbatch \d in chunk 0 where input of microbatch \d",
        ):
            check_graphs(actions, replace(plan, slots=fewer))


def test_a_send_in_flight_is_caught():
    """The last rank replays one set; its next forward must not use memory whose content is still
    on its way.
    """
    actions = lower_all(build_schedule("1f1b", 2, 6))[1]
    plan = plan_graphs(actions, [1])
    assert plan.copy_sent
    with pytest.raises(
        ValueError,
        match=r"F1.0 writes scratch F of microbatch 1 .* where gradient of microbatch 0 in",
    ):
        check_graphs(actions, replace(plan, copy_sent=False))
    check_graphs(
        lower_all(build_schedule("1f1b", 2, 6), overlap=False)[1], replace(plan, copy_sent=False)
    )


def test_a_microbatch_graph_that_replays_out_of_order_is_caught():
    """One pool is sound in the order of capture; graphs of a list, replayed for another list,
    are not.
    """
    captured = plan_graphs(build_schedule("1f1b", 4, 8)[0], [1])
    with pytest.raises(ValueError, match="is still needed"):
        check_graphs(build_schedule("gpipe", 4, 8)[0], captured)


@pytest.mark.parametrize(
    ("layers", "key", "message"),
    [
        ([4], "microbatch", r"2 chunks, but num_layers_per_chunk=\[4\] has 1"),
        ([4, 4], "layer", "key='layer' is neither microbatch nor slot"),
    ],
)
def test_refusals(layers: list[int], key: str, message: str):
    with pytest.raises(ValueError, match=message):
        plan_graphs(build_schedule("interleaved", 2, 4, num_chunks=2)[0], layers, key)
    assert plan_graphs([], []).num_graphs == plan_graphs([], []).num_slots == 0


def test_the_plan_of_a_run_proves_its_own_graphs(monkeypatch: pytest.MonkeyPatch):
    """Training and the plan command read these: graphs that overwrite each other are refused."""
    run = load("model=dense_tiny", "parallel.pp=2", "cuda_graph=layer", "train.global_batch=64")

    def shared(*chosen: object) -> list[GraphPlan]:
        plans = select.select_graphs(*chosen)
        return [replace(plan, slots=dict.fromkeys(plan.slots, 0)) for plan in plans]

    assert Plan(run).graphs == select.select_graphs(run, Plan(run).stages, Plan(run).actions)
    monkeypatch.setattr("app.planner.plan.select_graphs", shared)
    with pytest.raises(ValueError, match=r"F1\.0 writes input of microbatch 1 .* is still needed"):
        _ = Plan(run).graphs
