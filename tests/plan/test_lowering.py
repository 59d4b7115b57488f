from __future__ import annotations

import cProfile
import re
from collections import Counter
from itertools import pairwise, product

import pytest
from symbolic import run

from app.plan.actions import (
    Action,
    Backward,
    Compute,
    Exchange,
    Forward,
    Free,
    GatherParams,
    P2POp,
    ReduceGrads,
    Wait,
)
from app.plan.pipeline.check import check
from app.plan.pipeline.lowering import lower, lower_all
from app.plan.pipeline.timeline import Times, simulate
from app.plan.schedule import build_schedule, signed_order, v_shaped, warmup_count
from tests.actions import parse_action
from tests.cases import each
from tests.oracle import oracle

# Megatron-Core 0.16.1
GOLDEN = oracle("schedule")


CHUNKS = {"1f1b": 1, "gpipe": 1, "zero_bubble_h1": 1, "interleaved": 2, "zero_bubble_v": 2}


def words(actions: list[Action]) -> str:
    return " ".join(map(str, actions))


def lowered(text: str) -> str:
    return words(lower([parse_action(word) for word in text.split()]))


def test_chunks_gather_before_forward_and_reduce_after_backward():
    assert (
        lowered("F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0")
        == "G0 F0.0 G1 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 R1 B1.0 R0"
    )


def test_split_backward_reduces_after_its_last_weight_gradients():
    assert lowered("F0.0 F1.0 I0.0 W0.0 I1.0 W1.0") == "G0 F0.0 F1.0 I0.0 W0.0 I1.0 W1.0 R0"


def test_forwards_alone_reduce_nothing():
    assert lowered("F0.0 F1.0") == "G0 F0.0 F1.0"
    assert lower([]) == []


def test_one_rank_has_nothing_to_exchange():
    schedule = build_schedule("none", 1, 3)
    assert lower_all(schedule) == [lower(schedule[0])] == lower_all(schedule, overlap=False)


def test_exchanges_that_are_waited_for_where_they_stand():
    first, last = map(words, lower_all(build_schedule("1f1b", 2, 3), overlap=False))
    assert first == (
        "G0 F0.0 X[F0.0>1] V[F0.0>1] D0.0 F1.0 X[F1.0>1] V[F1.0>1] D1.0 X[B0.0<1] V[B0.0<1] B0.0 "
        "F2.0 X[F2.0>1,B1.0<1] V[F2.0>1,B1.0<1] D2.0 B1.0 X[B2.0<1] V[B2.0<1] B2.0 R0"
    )
    assert last == (
        "X[F0.0<0] G0 V[F0.0<0] F0.0 X[F1.0<0] V[F1.0<0] B0.0 X[B0.0>0] V[B0.0>0] F1.0 B1.0 "
        "X[F2.0<0,B1.0>0] V[F2.0<0,B1.0>0] F2.0 B2.0 X[B2.0>0] R0 V[B2.0>0]"
    )


def test_overlapped_exchanges_post_early_and_wait_late():
    first, last = map(words, lower_all(build_schedule("1f1b", 2, 3)))
    assert first == (
        "G0 F0.0 X[F0.0>1] F1.0 X[F1.0>1] X[B0.0<1] V[F0.0>1,B0.0<1] D0.0 B0.0 X[B1.0<1] "
        "V[F1.0>1] D1.0 F2.0 X[F2.0>1] V[B1.0<1] B1.0 X[B2.0<1] V[F2.0>1,B2.0<1] D2.0 B2.0 R0"
    )
    assert last == (
        "X[F0.0<0] X[F1.0<0] G0 V[F0.0<0] F0.0 B0.0 X[B0.0>0] V[F1.0<0] F1.0 V[B0.0>0] B1.0 "
        "X[B1.0>0] "
        "X[F2.0<0] V[F2.0<0] F2.0 V[B1.0>0] B2.0 X[B2.0>0] R0 V[B2.0>0]"
    )


@pytest.mark.parametrize(("name", "chunks"), CHUNKS.items())
def test_passes_only_insert(name: str, chunks: int):
    schedule = build_schedule(name, 4, 8, num_chunks=chunks)
    for overlap in (False, True):
        for computes, actions in zip(
            schedule, lower_all(schedule, overlap, v_shape=v_shaped(name)), strict=True
        ):
            assert [action for action in actions if isinstance(action, Compute)] == computes
            assert signed_order(actions) == signed_order(computes)
            counts = Counter(type(action) for action in actions)
            assert counts[GatherParams] == counts[ReduceGrads] == chunks
            ops = {op for action in actions if isinstance(action, Exchange) for op in action.ops}
            assert counts[Free] == sum(op.send and op.flow == "F" for op in ops)
            assert {
                op for action in actions if isinstance(action, Wait) for op in action.ops
            } == ops


@pytest.mark.parametrize(("pp", "chunks", "mbs"), list(product((2, 4), (2, 4), (4, 8, 16))))
def test_blocking_ranks_meet_once_per_forward_backward_pair(pp: int, chunks: int, mbs: int):
    for rank, actions in enumerate(
        lower_all(build_schedule("interleaved", pp, mbs, num_chunks=chunks), overlap=False)
    ):
        warmup, total = warmup_count(pp, rank, mbs, num_chunks=chunks), mbs * chunks
        pairs_and_singles = warmup + (total - warmup) + warmup
        assert sum(isinstance(action, Exchange) for action in actions) <= pairs_and_singles + 1


def test_a_schedule_that_waits_in_a_circle_is_refused():
    schedule = build_schedule("1f1b", 2, 2)
    schedule[0] = [Forward(0, 0), Backward(0, 0), Forward(1, 0), Backward(1, 0)]
    schedule[1] = [Forward(0, 0), Forward(1, 0), Backward(0, 0), Backward(1, 0)]
    for overlap in (False, True):
        with pytest.raises(ValueError, match=r"stuck, .* rank 0 at F0.0 >>> B0.0 <<< F1.0"):
            lower_all(schedule, overlap)


@pytest.mark.parametrize(
    ("name", "chunks", "forward_only"),
    [
        *((name, chunks, False) for name, chunks in CHUNKS.items()),
        ("interleaved", 3, True),
        ("zero_bubble_v", 2, True),
    ],
)
@pytest.mark.parametrize("pp", (2, 3, 4))
def test_stages_receive_inputs_and_sum_in_microbatch_order(
    name: str, chunks: int, forward_only: bool, pp: int
):
    last = pp * chunks - 1
    for mbs, overlap in product((pp, 2 * pp), (False, True)):
        schedule, v_shape = (
            build_schedule(name, pp, mbs, num_chunks=chunks, forward_only=forward_only),
            v_shaped(name),
        )
        sums = run(lower_all(schedule, overlap, v_shape=v_shape), chunks, v_shape)
        down = {stage: tuple(range(last, stage - 1, -1)) for stage in range(last + 1)}
        expected = {
            stage: [(mb, *range(last + 1), *down[stage]) for mb in range(mbs)] + [("reduced",)]
            for stage in down
        }
        assert sums == ({} if forward_only else expected)


@pytest.mark.parametrize(("name", "chunks"), CHUNKS.items())
def test_overlap_hides_sends_behind_compute(name: str, chunks: int):
    """Overlapped lists lose nothing to a list whose tensors travel without holding anyone up, or
    little in a V; others do.
    """
    most = 1.02 if v_shaped(name) else 1.005
    schedule, v_shape = build_schedule(name, 4, 16, num_chunks=chunks), v_shaped(name)
    overlapped, blocking = (
        lower_all(schedule, overlap, v_shape=v_shape) for overlap in (True, False)
    )
    for times in (
        Times(send=0.05),
        Times(send=0.2),
        Times(backward=1.7, send=0.1),
        Times(backward=2.5, send=0.1),
    ):
        ideal = simulate(schedule, times, v_shape).makespan
        assert simulate(overlapped, times, v_shape).makespan <= most * ideal
        assert simulate(blocking, times, v_shape).makespan > most * ideal


def test_the_middle_of_a_v_hands_over_without_an_exchange():
    first, last = lower_all(build_schedule("zero_bubble_v", 2, 1, num_chunks=2), v_shape=True)
    assert words(first) == (
        "G0 F0.0 X[F0.0>1] X[F0.1<1] G1 V[F0.1<1] F0.1 V[F0.0>1] D0.0 I0.1 X[B0.1>1] W0.1 "
        "X[B0.0<1] R1 "
        "V[B0.1>1,B0.0<1] I0.0 W0.0 R0"
    )
    assert words(last) == (
        "X[F0.0<0] G0 V[F0.0<0] F0.0 G1 F0.1 X[F0.1>0] X[B0.1<0] V[F0.1>0,B0.1<0] D0.1 I0.1 "
        "I0.0 X[B0.0>0] "
        "W0.1 R1 V[B0.0>0] W0.0 R0"
    )


def test_work_grows_with_microbatches_and_no_faster():
    def calls(name: str, chunks: int, mbs: int) -> int:
        """Python calls that lowering, checking and simulating take."""
        schedule, profile = build_schedule(name, 2, mbs, num_chunks=chunks), cProfile.Profile()
        with profile:
            for overlap in (True, False):
                lists = lower_all(schedule, overlap, v_shape=v_shaped(name))
                check(lists, schedule, v_shaped(name))
                simulate(lists, Times(send=0.1), v_shaped(name))
        return sum(entry.callcount for entry in profile.getstats())

    for name, chunks in CHUNKS.items():
        assert calls(name, chunks, 64) <= 2.1 * calls(name, chunks, 32)


def trace_name(trace: dict) -> str:
    return "-".join(str(trace[key]) for key in ("pp", "vpp", "M", "N", "rank", "opts"))


def lowered_trace(trace: dict, overlap: bool = True) -> list[Action]:
    """The list of the golden trace's rank."""
    group = {"num_chunks": trace["vpp"], "group_size": trace["N"]} if trace["vpp"] else {}
    schedule = build_schedule(
        "interleaved" if group else "1f1b",
        trace["pp"],
        trace["M"],
        forward_only="forward_only" in trace["opts"],
        **group,
    )
    return lower_all(schedule, overlap)[trace["rank"]]


def received(actions: list[Action], flow: str) -> list[P2POp]:
    return [
        op
        for action in actions
        if isinstance(action, Exchange)
        for op in action.ops
        if op.flow == flow and not op.send
    ]


# The golden traces hold more than actions: the context that keeps gradients from being synchronised
# is entered and left ("sync_off", "sync_on"), and calls are made that move nothing. Neither has a
# counterpart here.
TRACES = GOLDEN["full_traces"]


@each(t for t in TRACES if not {"gsf", "forward_only"} & set(t["opts"]))
def test_reductions_follow_backwards_as_in_golden_traces(trace: dict):
    events = trace["events"].split()
    synchronised = [
        after for event, after in pairwise(events) if event == "sync_on" and after[0] == "B"
    ]
    steps = [action for action in lowered_trace(trace) if isinstance(action, Compute | ReduceGrads)]
    assert [
        str(before) for before, action in pairwise(steps) if isinstance(action, ReduceGrads)
    ] == synchronised


@each(TRACES)
def test_gathers_and_last_stages_match_golden_traces(trace: dict):
    actions = lowered_trace(trace)
    steps = [action for action in actions if isinstance(action, Forward | GatherParams)]
    assert [
        str(after) for action, after in pairwise(steps) if isinstance(action, GatherParams)
    ] == trace["first_flag"]
    sent = {(action.mb, action.chunk) for action in actions if isinstance(action, Free)}
    kept = [
        str(action)
        for action in actions
        if isinstance(action, Forward) and (action.mb, action.chunk) not in sent
    ]
    assert kept == trace["last_stage_flag"]


@pytest.mark.parametrize(
    "trace", [t for t in TRACES if t["vpp"] and "overlap" not in t["opts"]], ids=trace_name
)
def test_blocking_interleaved_receives_match_golden_traces(trace: dict):
    """One call per forward before the steady part, per pair in it, and per backward after it,
    with the same receives.
    """
    golden: list[list[bool]] = []
    for call in trace["p2p"][1:]:  # the first receives the first input
        # the first gradient, where no forward is left for the steady part
        if call == "recv_backward":
            golden[-1][1] |= trace["rank"] < trace["pp"] - 1
        else:
            golden.append(["recv_prev1" in call, "recv_next1" in call])
    ours: list[list[bool]] = []
    steps = [
        action
        for action in lowered_trace(trace, overlap=False)
        if isinstance(action, Compute | Exchange)
    ]
    for before, action in pairwise([None, *steps]):
        if isinstance(action, Forward) or (
            isinstance(action, Backward) and not isinstance(before, Forward)
        ):
            ours.append([False, False])
        elif isinstance(action, Exchange) and ours:
            ours[-1] = [
                was or any(op.flow == flow and not op.send for op in action.ops)
                for was, flow in zip(ours[-1], "FB", strict=True)
            ]
    assert ours == golden


@pytest.mark.parametrize("trace", [t for t in TRACES if not t["vpp"]], ids=trace_name)
def test_blocking_1f1b_sends_and_receives_match_golden_traces(trace: dict):
    """Except that the last forward before the steady part is received when it is made, not when
    it is needed.
    """
    rank, last = trace["rank"], trace["pp"] - 1
    absent = (
        {"recv_forward", "send_backward"}
        if rank == 0
        else {"recv_backward", "send_forward"}
        if rank == last
        else set()
    )
    golden = [
        part
        for call in trace["p2p"]
        for part in re.findall("(?:send|recv)_(?:forward|backward)", call)
    ]
    golden = [part for part in golden if part not in absent]
    exchanges = [
        action for action in lowered_trace(trace, overlap=False) if isinstance(action, Exchange)
    ]
    ops = [op for action in exchanges for op in sorted(action.ops, key=lambda op: not op.send)]
    ours = [
        f"{'send' if op.send else 'recv'}_{'forward' if op.flow == 'F' else 'backward'}"
        for op in ops
    ]
    assert [name for name in ours if name != "recv_forward"] == [
        name for name in golden if name != "recv_forward"
    ]
    positions = [
        [place for place, name in enumerate(names) if name == "recv_forward"]
        for names in (ours, golden)
    ]
    assert all(mine <= theirs for mine, theirs in zip(*positions, strict=True))


@pytest.mark.parametrize("trace", [t for t in TRACES if "overlap" in t["opts"]], ids=trace_name)
def test_overlapped_lists_receive_as_much_as_the_golden_traces(trace: dict):
    """Which call brings what differs: there one call per forward or backward, here one exchange
    per moment.
    """
    actions = lowered_trace(trace)
    assert len(received(actions, "F")) == sum("recv_prev1" in call for call in trace["p2p"]) + (
        trace["rank"] > 0
    )
    assert len(received(actions, "B")) == sum("recv_next1" in call for call in trace["p2p"])
