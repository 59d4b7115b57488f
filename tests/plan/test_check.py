from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic import run

from app.plan.actions import Action, Compute, Exchange
from app.plan.pipeline.check import check
from app.plan.pipeline.lowering import lower_all
from app.plan.pipeline.timeline import simulate
from app.plan.schedule import build_schedule, chunk_order, v_shaped
from app.planner.plan import Plan
from tests.actions import parse_action
from tests.cases import chosen
from tests.config import load

NAMES = ("none", "gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v")
Case = tuple[str, int, int, int, int | None]  # name, pp, microbatches, chunks, group size
SIZES = list(product(range(1, 9), range(1, 33), range(1, 5)))  # pp, microbatches, chunks
GRID: list[Case] = [(name, *size, None) for name in NAMES for size in SIZES]
GROUPS: list[Case] = [
    ("interleaved", *size, group) for size in SIZES for group in range(1, size[1] + 2)
]


def is_legal(
    name: str, pp: int, mbs: int, chunks: int, group: int | None, forward_only: bool = False
) -> bool:
    if name == "interleaved" and forward_only:
        return True
    if name == "interleaved":
        group = pp if group is None else group
        return 2 <= pp <= group <= mbs and not 0 < mbs % group < pp
    if name == "zero_bubble_v":
        return chunks == 2 and group is None
    return chunks == 1 and group is None and (pp == 1 or name != "none")


def prove(case: Case, forward_only: bool = False) -> None:
    """The case runs, and moving tensors costs it at most 5 % where that takes no time; or it is
    refused.
    """
    if not is_legal(*case, forward_only):
        with pytest.raises(ValueError):
            build_schedule(*case, forward_only=forward_only)
        return
    schedule, v_shape = build_schedule(*case, forward_only=forward_only), v_shaped(case[0])
    ideal = simulate(schedule, v_shape=v_shape).makespan
    for overlap in (False, True):
        lists = lower_all(schedule, overlap, v_shape=v_shape)
        check(lists, schedule, v_shape)
        assert simulate(lists, v_shape=v_shape).makespan <= 1.05 * ideal


def legal_half(cases: list[Case], number: int) -> list[Case]:
    """A seeded choice, half of it legal."""
    draw = random.Random(7)
    legal, illegal = (
        [case for case in cases if is_legal(*case) is wanted] for wanted in (True, False)
    )
    return draw.sample(legal, number // 2) + draw.sample(illegal, number - number // 2)


@pytest.mark.full
@pytest.mark.parametrize("count", chosen([20, 40], [20]))
def test_a_choice_of_schedules_runs_or_is_refused(count: int):
    for number, case in enumerate(legal_half(GRID, 2 * count) + legal_half(GROUPS, count)):
        prove(case, forward_only=number % 5 == 0)


@pytest.mark.full
@pytest.mark.parametrize(("name", "pp"), list(product(NAMES, range(1, 9))))
def test_every_schedule_runs_or_is_refused(name: str, pp: int):
    """All without groups; of those with groups, which are most of them, a third."""
    for number, case in enumerate(GRID + GROUPS[pp % 3 :: 3]):
        if case[:2] == (name, pp):
            prove(case)
            if number % 3 == 0:
                prove(case, forward_only=True)


@pytest.mark.parametrize("pp", chosen(range(1, 9), range(1, 6)))
def test_forwards_alone_run_with_fewer_microbatches_than_ranks(pp: int):
    for mbs, chunks in product(range(1, pp), range(1, 5)):
        prove(("interleaved", pp, mbs, chunks, None), forward_only=True)


@pytest.mark.parametrize("most", chosen([8, 20], [8]))
def test_forwards_alone_take_any_group(most: int):
    """Forward-only replaces illegal groups by legal ones: no rank waits for itself."""
    for pp, mbs, chunks in product(range(2, 9), range(1, most + 1), range(1, 5)):
        legal = [
            n for n in range(1, mbs + 1) if is_legal("interleaved", pp, mbs, chunks=chunks, group=n)
        ]
        orders = {n: chunk_order(mbs, chunks, n) for n in legal or [mbs]}
        for group in (None, *range(1, mbs + 3)):
            lists = build_schedule(
                "interleaved", pp, mbs, num_chunks=chunks, group_size=group, forward_only=True
            )
            order = [(action.mb, action.chunk) for action in lists[0]]
            wanted = pp if group is None else group
            assert order == orders.get(wanted, order) and order in orders.values()
            assert lists == lists[:1] * pp


def test_validation_with_fewer_microbatches_than_ranks():
    run = load("+experiment=deepseek_v3_2048")
    assert run.eval_microbatches < run.parallel.pp
    for count in (1, run.eval_microbatches):
        lists = Plan(run).validation_actions(count)
        for actions in lists:
            assert sum(isinstance(action, Compute) for action in actions) == 2 * count


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_forwards_alone_always_run(name: str):
    chunks = {"interleaved": range(1, 5), "zero_bubble_v": (2,)}.get(name, (1,))
    for pp, mbs, count in product(range(1, 9), range(1, 21), chunks):
        prove((name, pp, mbs, count, None), forward_only=True)


def example(
    name: str = "1f1b", pp: int = 2, mbs: int = 3, chunks: int = 1, overlap: bool = True
) -> tuple[list, list]:
    schedule = build_schedule(name, pp, mbs, num_chunks=chunks)
    return lower_all(schedule, overlap), schedule


def edited(rank: int, old: str, new: str, **options: object) -> tuple[list, list]:
    """The example with a part of one rank's text replaced."""
    lists, schedule = example(**options)
    text = " ".join(map(str, lists[rank]))
    assert old in text
    lists[rank] = [parse_action(word) for word in text.replace(old, new, 1).split()]
    return lists, schedule


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (
            1,
            "X[F0.0<0] X[F1.0<0]",
            "X[F1.0<0] X[F0.0<0]",
            "rank 0 sends F0 of stage 0 while rank 1 expects F1 of stage 0",
        ),
        (
            0,
            "X[F1.0>1] X[B0.0<1]",
            "X[B0.0<1] X[F1.0>1]",
            "stuck, .*: rank 0 at .* >>> X.B0.0<1. <<< .*; rank 1 at X.F0.0<0. >>>",
        ),
        (
            0,
            "F0.0 X[F0.0>1]",
            "X[F0.0>1] F0.0",
            "rank 0: F0.0>1 is sent before it is made: G0 >>> X",
        ),
        (0, "V[F0.0>1,B0.0<1]", "V[B0.0<1]", "its output has not left yet"),
        (0, "V[F0.0>1,B0.0<1]", "V[F0.0>1]", "its input is not there: .* >>> B0.0 <<<"),
        (0, "V[F0.0>1,B0.0<1]", "V[F0.0>1,B0.0<1,B0.0<1]", "lists an operation twice"),
        (0, "X[F0.0>1]", "X[F0.0>0]", "no other rank has a side of F0.0>0"),
        (0, "X[F0.0>1]", "X[F0.0>1,B0.0>1]", "no other rank has a side of B0.0>1"),
        (0, "D0.0 B0.0", "B0.0 D0.0", "its output is not freed"),
        (0, " D0.0", "", "its output is not freed"),
        (0, "D0.0 B0.0", "D0.0 D0.0 B0.0", "freed twice"),
        (0, "G0 F0.0", "F0.0 G0", "its parameters are not gathered"),
        (0, "G0 F0.0", "G0 G0 F0.0", "gathered twice"),
        (0, "B2.0 R0", "R0 B2.0", "its gradients are not complete"),
        (0, "R0", "", "rank 0: gradients of chunk 0 are never reduced"),
        (0, "R0", "R0 R0", "reduced twice"),
        (1, " V[B2.0>0]", "", "rank 1: B2.0>0 is never waited for"),
        (0, "F0.0 X[F0.0>1] F1.0", "F1.0 X[F0.0>1] F0.0", "the schedule has F0.0"),
        (0, "R0", "R0 F3.0", "the schedule has nothing more"),
    ],
)
def test_refusals_point_at_the_action(rank: int, old: str, new: str, message: str):
    with pytest.raises(ValueError, match=message):
        check(*edited(rank, old, new))


def test_lists_for_another_placement_are_refused():
    schedule = build_schedule("zero_bubble_v", 3, 4, num_chunks=2)
    with pytest.raises(ValueError, match="no other rank has a side"):
        check(lower_all(schedule, v_shape=True), schedule)


def test_what_is_missing_at_the_end_is_named():
    lists, schedule = example("none", 1, 2)
    with pytest.raises(ValueError, match=r"the schedule continues with B1.0: .* F1.0 >>> <<<"):
        check([lists[0][:-2]], schedule)
    with pytest.raises(ValueError, match="1 lists, but the schedule has 2 pipeline ranks"):
        check(lists, build_schedule("1f1b", 2, 2))


# lowered, what it was lowered from, in a V
Lists = tuple[list[list[Action]], list[list[Compute]], bool]
many = settings(max_examples=300, derandomize=True, deadline=None, database=None)


@st.composite
def lowered(draw: st.DrawFn) -> Lists:
    name = draw(st.sampled_from(NAMES))
    pp = 1 if name == "none" else draw(st.integers(2, 4))
    chunks = draw(st.integers(1, 3)) if name == "interleaved" else 1 + v_shaped(name)
    mbs = pp * draw(st.integers(1, 2)) if name == "interleaved" else draw(st.integers(1, 6))
    schedule = build_schedule(name, pp, mbs, num_chunks=chunks, forward_only=draw(st.booleans()))
    return (
        lower_all(schedule, draw(st.booleans()), v_shape=v_shaped(name)),
        schedule,
        v_shaped(name),
    )


def refuse(
    lists: list[list[Action]],
    schedule: list[list[Compute]],
    v_shape: bool,
    rank: int,
    edit: Callable[[list[Action]], object],
) -> None:
    edit(lists[rank])
    with pytest.raises(ValueError):
        check(lists, schedule, v_shape)


@many
@given(lowered(), st.data())
def test_a_dropped_action_is_refused(case: Lists, data: st.DataObject):
    rank = data.draw(st.integers(0, len(case[0]) - 1))
    place = data.draw(st.integers(0, len(case[0][rank]) - 1))
    refuse(*case, rank, lambda actions: actions.pop(place))


@pytest.mark.full
@many
@given(lowered(), st.data())
def test_a_duplicated_action_is_refused(case: Lists, data: st.DataObject):
    rank = data.draw(st.integers(0, len(case[0]) - 1))
    place = data.draw(st.integers(0, len(case[0][rank]) - 1))
    to = data.draw(st.integers(0, len(case[0][rank])))
    refuse(*case, rank, lambda actions: actions.insert(to, actions[place]))


@many
@given(lowered(), st.data())
def test_a_dropped_operation_is_refused(case: Lists, data: st.DataObject):
    places = [
        (rank, place)
        for rank, actions in enumerate(case[0])
        for place, action in enumerate(actions)
        if isinstance(action, Exchange)
    ]
    if places:
        rank, place = data.draw(st.sampled_from(places))
        ops = case[0][rank][place].ops
        gone = data.draw(st.integers(0, len(ops) - 1))
        refuse(
            *case,
            rank,
            lambda actions: actions.__setitem__(place, Exchange(ops[:gone] + ops[gone + 1 :])),
        )


@pytest.mark.full
@many
@given(lowered(), st.data())
def test_swapped_compute_is_refused(case: Lists, data: st.DataObject):
    rank = data.draw(st.integers(0, len(case[0]) - 1))
    places = [place for place, action in enumerate(case[0][rank]) if isinstance(action, Compute)]
    one, other = data.draw(st.sampled_from(places)), data.draw(st.sampled_from(places))
    if one != other:
        refuse(*case, rank, lambda actions: swap(actions, one, other))


@many
@given(lowered(), st.data())
def test_a_swap_of_any_two_is_refused_or_changes_nothing(case: Lists, data: st.DataObject):
    """Only neighbours on different tensors may pass, like a reduction and a wait.

    The run is then the same.
    """
    lists, schedule, v_shape = case
    chunks = max(action.chunk for actions in schedule for action in actions) + 1
    expected = run(lists, chunks, v_shape)
    rank = data.draw(st.integers(0, len(lists) - 1))
    one, other = (data.draw(st.integers(0, len(lists[rank]) - 1)) for _ in range(2))
    swap(lists[rank], one, other)
    try:
        check(lists, schedule, v_shape)
    except ValueError:
        return
    assert run(lists, chunks, v_shape) == expected
    assert [
        [action for action in actions if isinstance(action, Compute)] for actions in lists
    ] == schedule


def swap(actions: list[Action], one: int, other: int) -> None:
    actions[one], actions[other] = actions[other], actions[one]
