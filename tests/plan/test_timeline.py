from __future__ import annotations

from itertools import product

import pytest

from app.plan.lowering import lower_all
from app.plan.schedule import Exchange, Wait, build_schedule, parse_action
from app.plan.timeline import Times, simulate

SMALL = list(product(range(1, 6), range(1, 9)))  # pipeline ranks, microbatches


def parse(*texts: str) -> list[list]:
    return [[parse_action(word) for word in text.split()] for text in texts]


@pytest.mark.parametrize(("pp", "mbs"), SMALL)
def test_bubbles_and_memory_are_the_published_ones(pp: int, mbs: int):
    for name in ("gpipe", "1f1b"):
        timeline = simulate(build_schedule(name, pp, mbs))
        assert timeline.makespan == 3 * (mbs + pp - 1)
        assert timeline.bubble_fraction == pytest.approx((pp - 1) / (mbs + pp - 1))
        assert timeline.peak_in_flight == tuple(min(mbs, pp - rank) if name == "1f1b" else mbs for rank in range(pp))
    split = simulate(build_schedule("zero_bubble_h1", pp, max(mbs, pp)), Times(forward=3, backward=6, weight=2))
    assert split.makespan == 9 * max(mbs, pp) + (pp - 1) * (3 + 4 - 2)


def test_interleaving_divides_the_bubble_by_the_chunks():
    for chunks in (1, 2, 4):
        assert simulate(build_schedule("interleaved", 4, 8, chunks)).bubble_fraction == pytest.approx(3 / (8 * chunks + 3))


def test_every_action_of_a_small_step():
    schedule = build_schedule("1f1b", 2, 1)
    times = Times(forward=1, backward=2, send=0.25)
    assert simulate(schedule, times).makespan == 6.5
    timeline = simulate(lower_all(schedule), times)
    first, last = (" ".join(f"{e.action}:{e.start:g}-{e.end:g}" for e in events) for events in timeline.events)
    assert first == ("G0:0-0 F0.0:0-1 X[F0.0>1]:1-1.25 X[B0.0<1]:1.25-4.5 V[F0.0>1,B0.0<1]:1-4.5 D0.0:4.5-4.5 "
                     "B0.0:4.5-6.5 R0:6.5-6.5")
    assert last == ("X[F0.0<0]:0-1.25 G0:0-0 V[F0.0<0]:0-1.25 F0.0:1.25-2.25 B0.0:2.25-4.25 X[B0.0>0]:4.25-4.5 "
                    "R0:4.25-4.25 V[B0.0>0]:4.25-4.5")
    assert timeline.makespan == 6.5
    assert timeline.bubble_fraction == pytest.approx(1 - 6 / 13)


def test_exchanges_of_a_rank_run_one_after_the_other():
    """The second tensor is ready at 2, but moves when the first has: it takes 5."""
    first, second = parse("F0.0 X[F0.0>1] F1.0 X[F1.0>1] V[F0.0>1,F1.0>1]", "X[F0.0<0] X[F1.0<0] V[F0.0<0] F0.0 V[F1.0<0] F1.0")
    events = simulate([first, second], Times(send=5)).events
    moves = [(event.start, event.end) for event in events[0] if isinstance(event.action, Exchange)]
    assert moves == [(1, 6), (6, 11)]
    assert [event.end for event in events[1] if isinstance(event.action, Wait)] == [6, 11]


def test_an_exchange_starts_when_both_sides_have_come_to_it():
    late, early = parse("F0.0 F1.0 X[F0.0>1] V[F0.0>1]", "X[F0.0<0] V[F0.0<0] F0.0")
    assert simulate([late, early], Times(send=1)).events[1][1].end == 3
    early, late = parse("F0.0 X[F0.0>1] V[F0.0>1]", "F0.1 F1.1 X[F0.0<0] V[F0.0<0] F0.0")
    with pytest.raises(ValueError, match="stuck"):
        simulate([early, late])  # the second rank's chunk 1 waits for the first's, which it does not run


def test_nothing_takes_no_time():
    assert simulate([[], []]).makespan == simulate([[]]).bubble_fraction == 0


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble_h1", "interleaved"])
def test_sending_never_shortens_a_step(name: str):
    schedule = build_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    for lists in (schedule, lower_all(schedule), lower_all(schedule, overlap=False)):
        spans = [simulate(lists, Times(send=send)).makespan for send in (0, 0.1, 0.3, 1)]
        assert spans == sorted(spans)
        assert spans[0] == simulate(schedule).makespan < spans[-1]
