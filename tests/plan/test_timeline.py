from __future__ import annotations

from itertools import product

import pytest

from app.plan.actions import Compute, Exchange, Wait
from app.plan.dependencies import Pipeline
from app.plan.pipeline.lowering import lower_all
from app.plan.pipeline.timeline import Times, simulate
from app.plan.schedule import build_schedule, v_shaped
from app.planner.known import Known
from app.planner.plan import Plan
from tests.actions import parse_action
from tests.cases import each
from tests.config import load

SMALL = list(product(range(1, 6), range(1, 9)))  # pipeline ranks, microbatches
CHUNKS = {"gpipe": 1, "1f1b": 1, "zero_bubble_h1": 1, "interleaved": 2, "zero_bubble_v": 2}


def parse(*texts: str) -> list[list]:
    return [[parse_action(word) for word in text.split()] for text in texts]


@each(SMALL)
def test_bubbles_and_memory_are_the_published_ones(pp: int, mbs: int):
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(name, pp, mbs))
        assert timeline.makespan == 3 * (mbs + pp - 1)
        assert timeline.bubble_fraction == pytest.approx((pp - 1) / (mbs + pp - 1))
        assert timeline.peak_in_flight == tuple(
            min(mbs, pp - rank) if name == "1f1b" else mbs for rank in range(pp)
        )
    split = simulate(
        build_schedule("zero_bubble_h1", pp, max(mbs, pp)), Times(forward=3, backward=6, weight=2)
    )
    assert split.makespan == 9 * max(mbs, pp) + (pp - 1) * (3 + 4 - 2)


def test_interleaving_divides_the_bubble_by_the_chunks():
    for chunks in (1, 2, 4):
        assert simulate(
            build_schedule("interleaved", 4, 8, num_chunks=chunks)
        ).bubble_fraction == pytest.approx(3 / (8 * chunks + 3))


def test_every_action_of_a_small_step():
    schedule = build_schedule("1f1b", 2, 1)
    times = Times(forward=1, backward=2, send=0.25)
    assert simulate(schedule, times).makespan == 6.5
    timeline = simulate(lower_all(schedule), times)
    first, last = (
        " ".join(f"{e.action}:{e.start:g}-{e.end:g}" for e in events) for events in timeline.events
    )
    assert first == (
        "G0:0-0 F0.0:0-1 X[F0.0>1]:1-1.25 X[B0.0<1]:1.25-4.5 V[F0.0>1,B0.0<1]:1-4.5 D0.0:4.5-4.5 "
        "B0.0:4.5-6.5 R0:6.5-6.5"
    )
    assert last == (
        "X[F0.0<0]:0-1.25 G0:0-0 V[F0.0<0]:0-1.25 F0.0:1.25-2.25 B0.0:2.25-4.25 X[B0.0>0]:4.25-4.5 "
        "R0:4.25-4.25 V[B0.0>0]:4.25-4.5"
    )
    assert timeline.makespan == 6.5
    assert timeline.bubble_fraction == pytest.approx(1 - 6 / 13)


def test_exchanges_of_a_rank_run_one_after_the_other():
    """The second tensor is ready at 2, but moves when the first has: it takes 5."""
    first, second = parse(
        "F0.0 X[F0.0>1] F1.0 X[F1.0>1] V[F0.0>1,F1.0>1]",
        "X[F0.0<0] X[F1.0<0] V[F0.0<0] F0.0 V[F1.0<0] F1.0",
    )
    events = simulate([first, second], Times(send=5)).events
    moves = [(event.start, event.end) for event in events[0] if isinstance(event.action, Exchange)]
    assert moves == [(1, 6), (6, 11)]
    assert [event.end for event in events[1] if isinstance(event.action, Wait)] == [6, 11]


def test_an_exchange_starts_when_both_sides_have_come_to_it():
    late, early = parse("F0.0 F1.0 X[F0.0>1] V[F0.0>1]", "X[F0.0<0] V[F0.0<0] F0.0")
    assert simulate([late, early], Times(send=1)).events[1][1].end == 3
    early, late = parse("F0.0 X[F0.0>1] V[F0.0>1]", "F0.1 F1.1 X[F0.0<0] V[F0.0<0] F0.0")
    with pytest.raises(ValueError, match="stuck"):
        # the second rank's chunk 1 waits for the first's, which it does not run
        simulate([early, late])


def test_an_exchange_whose_other_side_never_comes_is_refused():
    lone, idle = parse("F0.0 X[F0.0>1] F1.0", "")
    with pytest.raises(ValueError, match=r"stuck, .*: rank 0 at F0.0 >>> X.F0.0>1. <<< F1.0"):
        simulate([lone, idle])


def test_every_stage_has_its_own_times():
    assert (
        simulate(build_schedule("1f1b", 2, 2), Times(forward=(1, 2), backward=(2, 4))).makespan
        == 15
    )
    split = simulate(
        build_schedule("zero_bubble_h1", 2, 1),
        Times(forward=(1, 2), backward=(3, 5), weight=(1, 2)),
    )
    assert split.makespan == 9
    timeline = simulate(
        build_schedule("interleaved", 2, 2, num_chunks=2),
        Times(forward=(1, 2, 3, 4), backward=(4, 3, 2, 1)),
    )
    ends = [{str(event.action): event.end for event in events} for events in timeline.events]
    assert ends[0] == {
        "F0.0": 1,
        "F1.0": 2,
        "F0.1": 6,
        "F1.1": 9,
        "B0.1": 13,
        "B1.1": 18,
        "B0.0": 23,
        "B1.0": 27,
    }
    assert ends[1] == {
        "F0.0": 3,
        "F1.0": 5,
        "F0.1": 10,
        "B0.1": 11,
        "F1.1": 15,
        "B1.1": 16,
        "B0.0": 19,
        "B1.0": 22,
    }
    assert timeline.bubble_fraction == pytest.approx(1 - 40 / 54)


@pytest.mark.parametrize("pp", range(1, 6))
def test_every_stage_has_one_place(pp: int):
    ranks = list(range(pp))
    for chunks, v_shape, holders in (
        (1, False, ranks),
        (3, False, ranks * 3),
        (2, True, ranks + ranks[::-1]),
    ):
        pipeline = Pipeline(pp, chunks, v_shape)
        assert [pipeline.rank(stage) for stage in range(pp * chunks)] == holders
        assert all(pipeline.stage(rank, stage // pp) == stage for stage, rank in enumerate(holders))


def test_the_middle_of_a_v_stays_on_its_rank():
    """Four stages, sends of 0.5 between all but the second and third, which the last rank holds
    both.
    """
    lists = parse("F0.0 F0.1 I0.1 W0.1 I0.0 W0.0", "F0.0 F0.1 I0.1 I0.0 W0.1 W0.0")
    assert lists == build_schedule("zero_bubble_v", 2, 1, num_chunks=2)
    times = Times(forward=(1, 2, 3, 4), backward=(8, 6, 4, 2), send=0.5)
    for actions in (lists, lower_all(lists, v_shape=True)):
        first, last = (
            {
                str(event.action): (event.start, event.end)
                for event in events
                if isinstance(event.action, Compute)
            }
            for events in simulate(actions, times, v_shape=True).events
        )
        assert first == {
            "F0.0": (0, 1),
            "F0.1": (7, 11),
            "I0.1": (11, 12),
            "W0.1": (12, 13),
            "I0.0": (18, 22),
            "W0.0": (22, 26),
        }
        assert last == {
            "F0.0": (1.5, 3.5),
            "F0.1": (3.5, 6.5),
            "I0.1": (12.5, 14.5),
            "I0.0": (14.5, 17.5),
            "W0.1": (17.5, 19.5),
            "W0.0": (19.5, 22.5),
        }


def test_times_are_for_as_many_stages_as_there_are():
    for wrong in ({"forward": (1, 2, 3)}, {"backward": (1,)}, {"weight": (1, 1, 1, 1, 1)}):
        with pytest.raises(ValueError, match=r"[135] times, one per stage, for 4 stages"):
            simulate(build_schedule("interleaved", 2, 2, num_chunks=2), Times(**wrong))


def test_nothing_takes_no_time():
    assert simulate([[], []]).makespan == simulate([[]]).bubble_fraction == 0


@pytest.mark.parametrize(("name", "chunks"), CHUNKS.items())
def test_sending_never_shortens_a_step(name: str, chunks: int):
    schedule, v_shape = build_schedule(name, 4, 8, num_chunks=chunks), v_shaped(name)
    for lists in (
        schedule,
        *(lower_all(schedule, overlap, v_shape=v_shape) for overlap in (True, False)),
    ):
        spans = [simulate(lists, Times(send=send), v_shape).makespan for send in (0, 0.1, 0.3, 1)]
        assert spans == sorted(spans)
        assert spans[0] == simulate(schedule, v_shape=v_shape).makespan < spans[-1]


@pytest.mark.full
def test_lists_of_one_run_serve_another_with_other_times():
    """Plans that share what they know say what each says alone."""
    known = Known()
    typed = ("model=dense_tiny", "parallel.pp=4", "train.global_batch=128")
    for schedule, more in product(
        ("1f1b", "zero_bubble_h1"), ((), ("train.seq_len=256",), ("train.micro_batch=4",))
    ):
        run = load(*typed, f"schedule={schedule}", *more)
        alone, shared = Plan(run), Plan(run, known)
        assert shared.step_seconds == alone.step_seconds
        assert shared.timeline == alone.timeline
        assert shared.timeline.makespan + shared.tail.seconds == shared.step_seconds
        assert shared.actions == alone.actions and shared == alone
    assert len(known.schedules.orders) == 4  # of two schedules and two numbers of microbatches
