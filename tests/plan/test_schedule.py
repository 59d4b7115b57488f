from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Free,
    GatherParams,
    P2POp,
    ReduceGrads,
    Wait,
)
from app.plan.schedule import (
    build_schedule,
    peak_in_flight,
    signed_order,
    warmup_count,
)
from tests.actions import parse_action
from tests.cases import each
from tests.oracle import oracle

# Megatron-Core 0.16.1
GOLDEN = oracle("schedule")
RAN = [case for case in GOLDEN["interleaved"] if "run" in case]
REFUSED = [case for case in GOLDEN["interleaved"] if "run_error" in case]
SMALL = list(product(range(1, 6), range(1, 9)))  # pipeline ranks, microbatches


def texts(actions: Sequence[object]) -> str:
    return " ".join(map(str, actions))


def makespan(
    lists: list[list[Action]], num_chunks: int, times: dict[str, float], v_shape: bool = False
) -> float:
    """Time of a step when each action starts as soon as its rank and what it needs are ready;
    fails on a stuck list.
    """
    pp, done = len(lists), {}
    clocks, places = [0.0] * pp, [0] * pp

    def needs(action: Action, stage: int) -> list[tuple[str, int, int]]:
        match action:
            case Forward():
                return [("F", action.mb, stage - 1)] if stage else []
            case BackwardWeight():
                return [("I", action.mb, stage)]
        later = [(action.letter, action.mb, stage + 1)] if stage < pp * num_chunks - 1 else []
        return [("F", action.mb, stage), *later]

    def advance(rank: int) -> bool:
        if places[rank] == len(lists[rank]):
            return False
        action = lists[rank][places[rank]]
        stage = 2 * pp - 1 - rank if v_shape and action.chunk else action.chunk * pp + rank
        if any(need not in done for need in needs(action, stage)):
            return False
        clocks[rank] = (
            max([clocks[rank], *(done[need] for need in needs(action, stage))])
            + times[action.letter]
        )
        done[action.letter, action.mb, stage] = clocks[rank]
        places[rank] += 1
        return True

    while any([advance(rank) for rank in range(pp)]):
        pass
    assert places == [len(actions) for actions in lists], "stuck"
    return max(clocks)


@each(RAN)
def test_interleaved_runs_as_the_golden_one(case: dict):
    lists = build_schedule(
        "interleaved", case["pp"], case["M"], num_chunks=case["vpp"], group_size=case["N"]
    )
    for rank, run in case["run"].items():
        assert texts(lists[int(rank)]) == run
    orders = case["order"].items() if isinstance(case["order"], dict) else enumerate(case["order"])
    for rank, order in orders:
        assert signed_order(lists[int(rank)]) == order


@each(RAN)
def test_forward_only_keeps_the_table_order(case: dict):
    table = [
        Forward(mb, chunk) for mb, chunk in zip(case["table_mb"], case["table_chunk"], strict=True)
    ]
    assert (
        build_schedule(
            "interleaved",
            case["pp"],
            case["M"],
            num_chunks=case["vpp"],
            group_size=case["N"],
            forward_only=True,
        )
        == [table] * case["pp"]
    )


@each(REFUSED)
def test_interleaved_refuses_what_the_golden_one_refuses(case: dict):
    with pytest.raises(ValueError):
        build_schedule(
            "interleaved", case["pp"], case["M"], num_chunks=case["vpp"], group_size=case["N"]
        )


@each(GOLDEN["interleaved"])
def test_interleaved_warmups_equal_the_golden_ones(case: dict):
    args, ranks = (case["M"], case["vpp"], case["N"]), range(case["pp"])
    assert [warmup_count(case["pp"], rank, *args) for rank in ranks] == case["warmup"]
    assert [warmup_count(case["pp"], rank, *args, moe_overlap=True) for rank in ranks] == case[
        "warmup_moe_overlap"
    ]
    assert [warmup_count(case["pp"], rank, *args, forward_only=True) for rank in ranks] == case[
        "warmup_forward_only"
    ]


@each(GOLDEN["plain"])
def test_1f1b_equals_the_golden_one(case: dict):
    pp, mbs = case["pp"], case["M"]
    assert [warmup_count(pp, rank, mbs) for rank in range(pp)] == case["warmup"]
    assert [warmup_count(pp, rank, mbs, forward_only=True) for rank in range(pp)] == case[
        "warmup_forward_only"
    ]
    lists = build_schedule("1f1b", pp, mbs)
    for rank, run in case.get("run", {}).items():
        assert texts(lists[int(rank)]) == " ".join(f"{action}.0" for action in run.split())


@each(GOLDEN["full_traces"])
def test_computes_what_the_golden_traces_compute(trace: dict):
    chunks, group = (trace["vpp"], trace["N"]) if trace["vpp"] else (1, None)
    name = "interleaved" if group else "1f1b"
    lists = build_schedule(
        name,
        trace["pp"],
        trace["M"],
        num_chunks=chunks,
        group_size=group,
        forward_only=trace["opts"].get("forward_only", False),
    )
    assert texts(lists[trace["rank"]]).split() == [
        event for event in trace["events"].split() if event[0] in "FB"
    ]


def test_group_sizes_are_refused_as_in_the_golden_table():
    chunks = GOLDEN["group_size_validity"]["vpp"]
    for pp, mbs, group, verdict in GOLDEN["group_size_validity"]["rows"]:
        if verdict == 1:
            assert (
                len(build_schedule("interleaved", pp, mbs, num_chunks=chunks, group_size=group))
                == pp
            )
        else:
            with pytest.raises(ValueError):
                build_schedule("interleaved", pp, mbs, num_chunks=chunks, group_size=group)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("2f2b", 2, 4), "unknown schedule '2f2b'; there are none, gpipe"),
        (("none", 2, 4), "one pipeline rank, not on pp=2"),
        (("1f1b", 2, 0), "num_microbatches=0 .* at least 1"),
        (("1f1b", 2, 4, 2), "not num_chunks=2 and group_size=None; use interleaved"),
        (("gpipe", 2, 4, 1, 2), "not num_chunks=1 and group_size=2"),
        (("zero_bubble_v", 2, 4), "two chunks per rank and no groups, not num_chunks=1"),
        (("zero_bubble_v", 2, 4, 3), "not num_chunks=3 and group_size=None; use 2 and None"),
        (("zero_bubble_v", 2, 4, 2, 2), "not num_chunks=2 and group_size=2"),
        (("interleaved", 1, 4, 2), "needs at least 2 pipeline ranks"),
        (("interleaved", 4, 3, 2), "3 < 4"),
        (
            ("interleaved", 4, 8, 2, 3),
            "group_size=3 must be between pp=4 and num_microbatches=8; nearest that works: 4",
        ),
        (
            ("interleaved", 4, 9, 2),
            "group_size=4 leaves num_microbatches=9 a last group of 1, below pp=4; nearest "
            "that works: 5",
        ),
    ],
)
def test_refusals_name_the_numbers(args: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        build_schedule(*args)


@pytest.mark.parametrize(
    "args",
    [
        ("none", 2, 4),
        ("1f1b", 2, 0),
        ("1f1b", 2, 4, 2),
        ("zero_bubble_v", 2, 4),
        ("interleaved", 2, 4, 2, 0),
        ("interleaved", 2, 0, 2),
    ],
)
def test_forwards_alone_are_refused_only_what_no_schedule_is(args: tuple):
    with pytest.raises(ValueError):
        build_schedule(*args, forward_only=True)


def test_worked_examples():
    assert [warmup_count(4, rank, 8) for rank in range(4)] == [3, 2, 1, 0]
    steady = [1] * 4 + [2] * 4 + [1, 1] + [1, -2] * 2 + [2, -2] * 2 + [2, -1] * 2
    drain = [-1, -1] + [-2] * 4 + [-1] * 4
    assert signed_order(build_schedule("interleaved", 4, 8, num_chunks=2)[0]) == steady + drain
    assert texts(build_schedule("none", 1, 3)[0]) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert texts(build_schedule("gpipe", 2, 3)[1]) == "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"
    assert (
        texts(build_schedule("zero_bubble_h1", 2, 3)[0])
        == "F0.0 F1.0 I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0"
    )
    assert (
        texts(build_schedule("zero_bubble_h1", 2, 3)[1])
        == "F0.0 I0.0 F1.0 I1.0 W0.0 F2.0 I2.0 W1.0 W2.0"
    )
    first, last = build_schedule("zero_bubble_v", 2, 3, num_chunks=2)
    assert texts(first) == (
        "F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 I0.0 I1.1 W0.0 W1.1 F2.1 I2.1 I1.0 W1.0 I2.0 W2.1 W2.0"
    )
    assert texts(last) == (
        "F0.0 F0.1 F1.0 F1.1 I0.1 I0.0 W0.1 W0.0 F2.0 F2.1 I1.1 I1.0 I2.1 I2.0 W1.1 W1.0 W2.1 W2.0"
    )


@each((name, *sizes) for name in ("gpipe", "1f1b", "zero_bubble_h1") for sizes in SMALL)
def test_every_microbatch_is_computed_once(name: str, pp: int, mbs: int):
    for actions in build_schedule(name, pp, mbs):
        assert len(set(actions)) == len(actions) == mbs * (3 if name == "zero_bubble_h1" else 2)
        assert {action.mb for action in actions} == set(range(mbs))


@each(SMALL)
def test_bubbles_and_memory_are_the_published_ones(pp: int, mbs: int):
    gpipe, plain, split = (
        build_schedule(name, pp, mbs) for name in ("gpipe", "1f1b", "zero_bubble_h1")
    )
    whole = {"F": 10, "B": 19}
    assert makespan(gpipe, 1, whole) == makespan(plain, 1, whole) == (mbs + pp - 1) * 29
    assert [peak_in_flight(actions) for actions in gpipe] == [mbs] * pp
    assert [peak_in_flight(actions) for actions in plain] == [
        min(mbs, pp - rank) for rank in range(pp)
    ]
    time = makespan(split, 1, {"F": 10, "I": 11, "W": 8})
    assert time == mbs * 29 + (pp - 1) * (10 + 11 - 8) if mbs >= pp else time <= (mbs + pp - 1) * 29
    assert max(map(peak_in_flight, split)) == min(mbs, pp)


@each(product((2, 3, 4), (2, 3, 4), (1, 2, 3)))
def test_interleaving_divides_the_bubble_by_the_chunks(pp: int, chunks: int, rounds: int):
    mbs = pp * rounds
    lists = build_schedule("interleaved", pp, mbs, num_chunks=chunks)
    assert makespan(lists, chunks, {"F": 1, "B": 2}) == 3 * chunks * mbs + 3 * (pp - 1)
    for rank, actions in enumerate(lists):
        assert peak_in_flight(actions) == min(
            mbs * chunks, warmup_count(pp, rank, mbs, num_chunks=chunks) + 1
        )


@each(product((*range(1, 9), 16), (1, 2, 3, 5, 8, 16, 23, 32)))
def test_a_v_has_half_the_bubble_of_zb_h1_in_the_memory_of_1f1b(pp: int, mbs: int):
    """In times of a stage's F = I = W; a stage of one chunk per rank takes two."""
    lists = build_schedule("zero_bubble_v", pp, mbs, num_chunks=2)
    for actions in lists:
        assert len(set(actions)) == len(actions) == 6 * mbs
        assert {(action.mb, action.chunk) for action in actions} == set(
            product(range(mbs), range(2))
        )
    assert max(map(peak_in_flight, lists)) == 2 * min(mbs, pp)
    time = makespan(lists, 2, dict.fromkeys("FIW", 1), v_shape=True)
    if mbs >= 2 * pp:  # the last rank starts when pp − 1 others have run one action
        assert time == 6 * mbs + pp - 1
    assert time <= makespan(build_schedule("zero_bubble_h1", pp, mbs), 1, dict.fromkeys("FIW", 2))


@pytest.mark.parametrize(
    "parts", [(10, 11, 8), (10, 12, 8), (20, 17, 17), (4, 5, 5), (2, 3, 2), (10, 10, 7)]
)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_v_bubble_is_independent_of_microbatches(parts: tuple[int, int, int], pp: int):
    times, twice = (
        dict(zip("FIW", (scale * part for part in parts), strict=True)) for scale in (1, 2)
    )
    few, many = (
        makespan(build_schedule("zero_bubble_v", pp, mbs, num_chunks=2), 2, times, v_shape=True)
        - 2 * mbs * sum(parts)
        for mbs in (2 * pp, 8 * pp)
    )
    assert few == many
    assert few < makespan(build_schedule("zero_bubble_h1", pp, 2 * pp), 1, twice) - 4 * pp * sum(
        parts
    )


@each(SMALL)
def test_forwards_through_a_v_wait_for_nothing(pp: int, mbs: int):
    """The last rank runs 2·mbs of them after pp − 1 others have run one, and then the last
    microbatch goes back up.
    """
    lists = build_schedule("zero_bubble_v", pp, mbs, num_chunks=2, forward_only=True)
    assert makespan(lists, 2, {"F": 1}, v_shape=True) == 2 * mbs + 2 * (pp - 1)
    assert all(len(set(actions)) == len(actions) == 2 * mbs for actions in lists)


def test_actions_round_trip_through_text():
    compute = [Forward(3, 0), Backward(12, 1), BackwardInput(0, 10), BackwardWeight(7, 2)]
    ops = P2POp("F", 3, 0, peer=1, send=True), P2POp("B", 12, 1, peer=10, send=False)
    actions = [*compute, Exchange(ops), Wait(ops[1:]), Free(3, 0), ReduceGrads(0), GatherParams(11)]
    assert texts(actions) == "F3.0 B12.1 I0.10 W7.2 X[F3.0>1,B12.1<10] V[B12.1<10] D3.0 R0 G11"
    assert [parse_action(text) for text in texts(actions).split()] == actions
    compute = ("F3", "F-1.0", "f1.0", "F1.0 ", "", "F1.0.0", "F[F1.0>1]")
    for text in (*compute, "X1.0", "R0.1", "X[]", "X[F1.0>1", "X[W1.0>1]", "V[F1.0]"):
        with pytest.raises(ValueError, match="is no action"):
            parse_action(text)


def test_signed_order_lists_forwards_and_input_gradients_only():
    actions = [
        GatherParams(0),
        Forward(0, 1),
        BackwardInput(0, 1),
        BackwardWeight(0, 1),
        Backward(0, 0),
        "another kind",
    ]
    assert signed_order(actions) == [2, -2, -1]
    for split, plain in zip(
        build_schedule("zero_bubble_h1", 4, 6), build_schedule("1f1b", 4, 6), strict=True
    ):
        assert signed_order(split) == signed_order(plain)


def test_forwards_alone_keep_one_in_flight():
    assert [
        peak_in_flight(actions) for actions in build_schedule("1f1b", 2, 4, forward_only=True)
    ] == [1, 1]
    assert peak_in_flight([]) == 0
