from __future__ import annotations

import time
from itertools import chain, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.plan.sharding.reshard import Block, Overlap, Slice, overlaps
from app.plan.shards import buffer_layout

many = settings(max_examples=300, derandomize=True, deadline=None, database=None)


def contents(held: Slice) -> list[int]:
    """Positions in the flattened global tensor of what a slice holds, one loop per dimension."""
    block, strides = (
        held.block,
        [prod(held.block.shape[dim + 1 :]) for dim in range(len(held.block.shape))],
    )
    boxes = product(
        *(range(start, stop) for start, stop in zip(block.start, block.stop, strict=True))
    )
    flat = [sum(at * stride for at, stride in zip(point, strides, strict=True)) for point in boxes]
    return flat[slice(*held.bounds)]


@st.composite
def blocks(draw: st.DrawFn, shape: tuple[int, ...]) -> Block:
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Block(
        shape,
        start,
        tuple(draw(st.integers(low + 1, size)) for low, size in zip(start, shape, strict=True)),
    )


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    block = draw(blocks(shape) | st.just(Block.whole(*shape)))
    if draw(st.booleans()):
        return Slice(block)
    begin = draw(st.integers(0, block.numel))
    return Slice(block, (begin, draw(st.integers(begin, block.numel))))


@many
@given(
    st.lists(st.integers(1, 5), max_size=4).flatmap(
        lambda shape: st.tuples(slices(tuple(shape)), slices(tuple(shape)))
    )
)
def test_overlaps_are_what_both_hold(pair: tuple[Slice, Slice]):
    have, want = map(contents, pair)
    found = list(overlaps(*pair))
    assert [have[slice(*run.have)] for run in found] == [want[slice(*run.want)] for run in found]
    assert [position for run in found for position in have[slice(*run.have)]] == sorted(
        set(have) & set(want)
    )
    assert all(run.have[0] < run.have[1] for run in found)


GATE_AND_UP, DOWN, STACKED = (2, 12, 5), (5, 12), (4, 3, 2, 12)  # [2F, D], [D, F], [E, D, 2F]


def cut(shape: tuple[int, ...], tp: int, tp_rank: int, ep: int = 1, ep_rank: int = 0) -> Block:
    """Return a rank's block of the matrices above: tp divides the widths F, ep the experts E."""
    whole = Block.whole(*shape)
    return (
        whole.cut(shape.index(12), tp, tp_rank)
        if len(shape) < 4
        else whole.cut(0, ep, ep_rank).cut(3, tp, tp_rank)
    )


def state(shape: tuple[int, ...], tp: int, ep: int, dp: int, align: int) -> list[Slice]:
    """Return the slices of one parameter's optimizer state: every block in dp shards."""
    held = []
    for tp_rank, ep_rank in product(range(tp), range(ep if len(shape) == 4 else 1)):
        block = cut(shape, tp, tp_rank, ep=ep, ep_rank=ep_rank)
        layout = buffer_layout([block.numel], dp, shard_align=align)
        held += [
            Slice(block, part.param)
            for rank in range(dp)
            for parts in layout.ranges(rank)
            for part in parts
        ]
    return held


@pytest.mark.parametrize("shape", [GATE_AND_UP, DOWN, STACKED, (12, 5)])
@pytest.mark.parametrize(
    ("before", "after"), [((4, 1, 2), (1, 4, 3)), ((2, 2, 5), (3, 1, 1)), ((1, 1, 1), (6, 2, 4))]
)
def test_state_moves_between_any_two_layouts(shape: tuple[int, ...], before: tuple, after: tuple):
    held, wanted = state(shape, *before, align=4), state(shape, *after, align=1)
    values = [contents(have) for have in held]
    assert sorted(chain(*values)) == list(range(prod(shape)))
    for want in wanted:
        filled: list[list[int]] = [[] for _ in contents(want)]
        for have, value in zip(held, values, strict=True):
            for run in overlaps(have, want):
                for to, element in zip(range(*run.want), value[slice(*run.have)], strict=True):
                    filled[to].append(element)
        assert filled == [[element] for element in contents(want)]


def test_gate_and_up_are_two_ranges_of_rows():
    first, second = (Block.whole(2, 8, 3).cut(1, 2, rank) for rank in (0, 1))
    whole = Slice(Block.whole(2, 8, 3))
    assert list(overlaps(whole, Slice(first))) == [
        Overlap((0, 12), (0, 12)),
        Overlap((24, 36), (12, 24)),
    ]
    assert list(overlaps(whole, Slice(second))) == [
        Overlap((12, 24), (0, 12)),
        Overlap((36, 48), (12, 24)),
    ]
    assert list(overlaps(Slice(first), Slice(second))) == []


def test_rows_are_one_run_and_columns_one_per_row():
    whole = Block.whole(6, 4)
    assert list(overlaps(Slice(whole.cut(0, 2, 1)), Slice(whole.cut(0, 3, 2)))) == [
        Overlap((4, 12), (0, 8))
    ]
    assert list(overlaps(Slice(whole), Slice(whole.cut(1, 2, 1)))) == [
        Overlap((4 * row + 2, 4 * row + 4), (2 * row, 2 * row + 2)) for row in range(6)
    ]
    assert list(overlaps(Slice(whole, (7, 12)), Slice(whole.cut(1, 2, 1), (4, 5)))) == [
        Overlap((3, 4), (0, 1))
    ]


def test_a_small_part_of_a_huge_block_is_found_at_once():
    whole = Block.whole(10**7, 10**3)
    start = time.process_time()
    found = list(
        overlaps(
            Slice(whole.cut(1, 2, 1), (10**9, 10**9 + 700)),
            Slice(whole, (2 * 10**9, 2 * 10**9 + 1800)),
        )
    )
    assert time.process_time() - start < 0.1
    assert found == [Overlap((0, 500), (500, 1000)), Overlap((500, 700), (1500, 1700))]


def test_blocks_that_do_not_meet_share_nothing():
    whole = Block.whole(4, 4, 4)
    first, last = whole.cut(0, 4, 0).cut(1, 4, 0), whole.cut(0, 4, 3).cut(1, 4, 3)
    for have, want in (
        (first, last),
        (last, first),
        (first, whole.cut(0, 2, 1)),
        (whole.cut(2, 4, 0), whole.cut(2, 4, 3)),
    ):
        assert have.intersection(want).numel == 0
        assert list(overlaps(Slice(have), Slice(want))) == []


def test_blocks_refuse_what_does_not_fit():
    whole = Block.whole(6, 4)
    with pytest.raises(ValueError, match="6 elements along dimension 0 do not divide into 4 parts"):
        whole.cut(0, 4, 0)
    with pytest.raises(ValueError, match="part 3 is outside the 3 parts"):
        whole.cut(0, 3, 3)
    with pytest.raises(ValueError, match=r"shape \(6, 4\) and of one of shape \(4, 6\)"):
        list(overlaps(Slice(whole), Slice(Block.whole(4, 6))))
