"""Functions that map our weights to the tensors of files, one or several.

`transformers` 4 stores a tensor per expert. Version 5 keeps all experts of a layer in one
three-dimensional tensor; it still saves a tensor per expert unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from app.config import ModelConfig
from app.hf.weight_part import WeightPart
from app.plan.sharding.reshard import Block

Shape = tuple[int, ...]
# returns the parts of a weight of this shape, given the names of their tensors
Fit = Callable[[ModelConfig, Shape, Sequence[str]], Iterator[WeightPart]]


def whole(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map a tensor that is the same in both."""
    (name,) = theirs
    yield WeightPart.same(name, shape)


def heads(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map queries, keys and values; ours are ordered by key/value head: queries, key, value. A gate
    follows its query in both.
    """
    groups, width, columns = model.num_kv_heads, model.head_width, shape[1:]
    queries = model.num_heads // groups * (2 if model.attention_gate else 1)
    apart = (groups, queries + 2, width, *columns)
    first = 0
    for name, heads in zip(theirs, (queries, 1, 1), strict=True):
        start = (0, first, *(0 for _ in apart[2:]))
        stop = (groups, first + heads, width, *columns)
        their_whole = Block.whole(groups, heads, width, *columns)
        order = tuple(range(len(apart)))
        rows = groups * heads * width
        yield WeightPart(name, (rows, *columns), Block(apart, start, stop), their_whole, order)
        first += heads


def heads_of_pairs(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map queries, keys and values as `heads`; values 2i and 2i + 1 of their query and key heads
    are values i and i + width / 2 of ours.
    """
    groups, width, columns = model.num_kv_heads, model.head_width, shape[1:]
    queries = model.num_heads // groups
    apart = (groups, queries + 2, 2, width // 2, *columns)
    dims = tuple(range(len(apart)))
    first = 0
    for name, heads in zip(theirs, (queries, 1, 1), strict=True):
        stop = (groups, first + heads, 2, width // 2, *columns)
        ours = Block(apart, (0, first, *(0 for _ in dims[2:])), stop)
        same = name == theirs[-1]  # values are not rotated
        pair = (2, width // 2) if same else (width // 2, 2)
        order = dims if same else (0, 1, 3, 2, *dims[4:])
        whole = Block.whole(groups, heads, *pair, *columns)
        yield WeightPart(name, (groups * heads * width, *columns), ours, whole, order)
        first += heads


def heads_together(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map all queries, then all keys, then all values, in one tensor."""
    (name,) = theirs
    groups, width, columns = model.num_kv_heads, model.head_width, shape[1:]
    queries, rest = model.num_heads // groups, (0,) * len(columns)
    apart, whole = (groups, queries + 2, width, *columns), (1, groups * (queries + 2), width)
    their_whole = (*whole, *columns)
    for first, heads in ((0, queries), (queries, 1), (queries + 1, 1)):
        for group in range(groups):
            low = groups * first + group * heads
            ours = Block(apart, (group, first, 0, *rest), (group + 1, first + heads, *apart[2:]))
            held = Block(their_whole, (0, low, 0, *rest), (1, low + heads, *apart[2:]))
            rows = whole[1] * width
            yield WeightPart(name, (rows, *columns), ours, held, tuple(range(len(apart))))


def heads_in_turn(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map queries, key and value of one key/value head after another, in one tensor as in ours."""
    (name,) = theirs
    groups, width, columns = model.num_kv_heads, model.head_width, shape[1:]
    queries, rest = model.num_heads // groups, (0,) * len(columns)
    apart = (groups, queries + 2, width, *columns)
    for group in range(groups):
        for first, heads in ((0, queries), (queries, 1), (queries + 1, 1)):
            box = Block(apart, (group, first, 0, *rest), (group + 1, first + heads, *apart[2:]))
            yield WeightPart(name, shape, box, box, tuple(range(len(apart))))


def gate_up_together(
    model: ModelConfig, shape: Shape, theirs: Sequence[str]
) -> Iterator[WeightPart]:
    """Map gate and up projections, one after the other in one tensor."""
    (name,) = theirs
    for number in range(2):
        half = Block.whole(*shape).cut(0, 2, number)
        yield WeightPart(name, (2 * shape[1], *shape[2:]), half, half, tuple(range(len(shape))))


def row(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map a vector that is a matrix of one row in files."""
    (name,) = theirs
    yield WeightPart(name, (1, *shape), Block.whole(*shape, 1), Block.whole(1, *shape), (1, 0))


def gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map gate and up projections, or their biases, one after the other in ours."""
    apart = shape[1:]
    dims = tuple(range(len(shape)))
    for number, name in enumerate(theirs):
        ours = Block.whole(*shape).cut(0, 2, number)
        yield WeightPart(name, apart, ours, Block.whole(1, *apart), dims)


def expert_gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map gate and up projections of experts, a tensor each."""
    experts, hidden, _, ffn = shape
    for expert in range(experts):
        for number, name in enumerate(theirs):
            ours = Block(shape, (expert, 0, number, 0), (expert + 1, hidden, number + 1, ffn))
            whole = Block.whole(1, 1, ffn, hidden)
            yield WeightPart(name.format(expert=expert), (ffn, hidden), ours, whole, (0, 3, 1, 2))


def expert_down(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map down projections of experts, a tensor each."""
    experts, ffn, hidden = shape
    (name,) = theirs
    for expert in range(experts):
        ours = Block(shape, (expert, 0, 0), (expert + 1, ffn, hidden))
        whole = Block.whole(1, hidden, ffn)
        yield WeightPart(name.format(expert=expert), (hidden, ffn), ours, whole, (0, 2, 1))


def stacked_gate_up(
    model: ModelConfig, shape: Shape, theirs: Sequence[str]
) -> Iterator[WeightPart]:
    """Map gate and up projections of all experts, gate first, one tensor."""
    experts, hidden, _, ffn = shape
    (name,) = theirs
    apart = (experts, 2, ffn, hidden)
    for number in range(2):
        ours = Block(shape, (0, 0, number, 0), (experts, hidden, number + 1, ffn))
        half = Block(apart, (0, number, 0, 0), (experts, number + 1, ffn, hidden))
        for expert in range(experts):  # each expert's gate (or up) half is one range of rows
            yield WeightPart(
                name,
                (experts, 2 * ffn, hidden),
                ours.cut(0, experts, expert),
                half.cut(0, experts, expert),
                (0, 3, 1, 2),
            )


def stacked_down(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map down projections of all experts, one tensor."""
    experts, ffn, hidden = shape
    (name,) = theirs
    ours, whole = Block.whole(*shape), Block.whole(experts, hidden, ffn)
    for expert in range(experts):
        yield WeightPart(
            name,
            (experts, hidden, ffn),
            ours.cut(0, experts, expert),
            whole.cut(0, experts, expert),
            (0, 2, 1),
        )


def alternating(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map gate and up projections, or their biases: in files the last dimension alternates."""
    (name,) = theirs
    *lead, both, ffn = shape
    apart = (*lead, ffn, both)
    dims = tuple(range(len(lead)))
    yield WeightPart(
        name,
        (*lead, both * ffn),
        Block.whole(*shape),
        Block.whole(*apart),
        (*dims, len(lead) + 1, len(lead)),
    )
