"""Correspondence between boxes of our weights and boxes of tensors in Hugging Face files.

Dimensions of both tensors are split first. Example: our weight of queries, keys and values has
(N + 2G)·H rows, ordered by key/value head; split, it is G × (N/G + 2) × H × D, and the queries are
a box of it. A part pairs such a box with the box of their tensor that has the same elements,
possibly with permuted dimensions. It holds no elements: reading, writing and checking all use the
same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from app.plan.sharding.reshard import Block


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Box of one of our weights, and the box with the same elements in one of their tensors."""

    name: str  # name of their tensor
    shape: tuple[int, ...]  # shape of their full tensor, as in its file
    ours: Block
    theirs: Block
    order: tuple[int, ...]  # dimension of ours -> dimension of theirs

    @classmethod
    def same(cls, name: str, shape: Sequence[int]) -> WeightPart:
        """Build the part of a tensor that is the same in both."""
        whole = Block.whole(*shape)
        return cls(name, tuple(shape), whole, whole, tuple(range(len(shape))))

    def within(self, have: Block) -> Cut | None:
        """Return the intersection with `have`, a block of our weight; None if it is empty."""
        held = refined(have, self.ours.shape)
        shared = held.intersection(self.ours)
        return Cut(self, held, shared) if shared.numel else None


@dataclass(frozen=True, slots=True)
class Cut:
    """Intersection of a part with the block of our weight that a rank holds."""

    part: WeightPart
    held: Block  # block of our weight that the rank holds
    shared: Block  # intersection of that block with the part

    def pieces(self, numel: int) -> Iterator[Cut]:
        """Split it along its first dimension into cuts of about `numel` elements at most."""
        sizes = self.shared.sizes
        dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        step = max(1, numel * sizes[dim] // self.shared.numel)
        first, last = [*self.shared.start], [*self.shared.stop]
        for low in range(self.shared.start[dim], self.shared.stop[dim], step):
            first[dim], last[dim] = low, min(low + step, self.shared.stop[dim])
            yield replace(self, shared=Block(self.shared.shape, tuple(first), tuple(last)))

    @property
    def box(self) -> tuple[slice, ...]:
        """Return its position in the held block."""
        return _slices(self.shared, self.held.start)

    @property
    def region(self) -> tuple[tuple[int, int], ...]:
        """Return its position in their tensor: (start, stop) for each dimension in the file."""
        part = self.part
        bounds = [(0, 0)] * len(part.order)
        for mine, other in enumerate(part.order):
            shift = part.theirs.start[other] - part.ours.start[mine]
            bounds[other] = (self.shared.start[mine] + shift, self.shared.stop[mine] + shift)
        return tuple(
            _range([(bounds[dim], part.theirs.shape[dim]) for dim in dims])
            for dims in grouped(part.shape, part.theirs.shape)
        )

    @property
    def their_sizes(self) -> tuple[int, ...]:
        """Return its shape in their split dimensions."""
        sizes = [0] * len(self.part.order)
        for mine, other in enumerate(self.part.order):
            sizes[other] = self.shared.sizes[mine]
        return tuple(sizes)


def refined(block: Block, shape: tuple[int, ...]) -> Block:
    """Return the same block of a tensor whose dimensions are split into this shape.

    Raises AssertionError if the block cuts through an inner dimension, such as a head.
    """
    start, stop = list(shape), list(shape)
    for low, high, dims in zip(block.start, block.stop, grouped(block.shape, shape), strict=True):
        cut = next((dim for dim in dims if shape[dim] > 1), dims[-1])
        inner = prod(shape[dim] for dim in dims if dim > cut)
        assert low % inner == 0 and high % inner == 0, f"{block} cuts through parts of {shape}"
        for dim in dims:
            start[dim], stop[dim] = 0, shape[dim]
        start[cut], stop[cut] = low // inner, high // inner
    return Block(shape, tuple(start), tuple(stop))


def grouped(shape: tuple[int, ...], apart: tuple[int, ...]) -> list[list[int]]:
    """Return, for each dimension of `shape`, the dimensions of `apart` that it is split into."""
    assert prod(shape) == prod(apart), f"{apart} are not the dimensions of {shape}"
    groups: list[list[int]] = []
    dims = iter(range(len(apart)))
    for size in shape:
        group = [next(dims)]
        while prod(apart[dim] for dim in group) != size:
            group.append(next(dims))
        groups.append(group)
    groups[-1] += dims  # left-over dimensions of size 1
    return groups


def _range(parts: list[tuple[tuple[int, int], int]]) -> tuple[int, int]:
    """Return (start, stop) in a dimension from the bounds and sizes of its split dimensions."""
    low = high = 0
    several = False  # an outer dimension spans several indices: the inner ones must be complete
    for (start, stop), size in parts:
        assert not several or (start, stop) == (0, size), "not one range of the file's dimension"
        low = low * size + start
        high = high * size + stop - 1
        several = several or stop - start > 1
    return low, high + 1


def _slices(block: Block, origin: tuple[int, ...]) -> tuple[slice, ...]:
    bounds = zip(block.start, block.stop, origin, strict=True)
    return tuple(slice(low - at, high - at) for low, high, at in bounds)


def by_tensor(parts: Sequence[WeightPart]) -> Iterator[tuple[WeightPart, ...]]:
    """Yield the parts of each tensor in the order of its elements.

    Raises AssertionError unless each part is one range of elements, and together they are all.
    """
    grouped_parts: dict[str, dict[tuple[int, int], WeightPart]] = {}
    for part in parts:
        grouped_parts.setdefault(part.name, {})[_elements(part)] = part
    for name, found in grouped_parts.items():
        end = 0
        for first, last in sorted(found):
            assert first == end, f"{name} is not put together from ranges of elements"
            end = last
        assert end == prod(next(iter(found.values())).shape), f"{name} lacks elements"
        yield tuple(found[ends] for ends in sorted(found))


def _elements(part: WeightPart) -> tuple[int, int]:
    """Return (start, stop) of a part among the elements of its tensor."""
    cut = Cut(part, Block.whole(*part.ours.shape), part.ours)
    return _range([*zip(cut.region, part.shape, strict=True)])


def names(parts: Sequence[WeightPart]) -> Iterator[str]:
    """Yield the names of their tensors, each once, in order."""
    yield from dict.fromkeys(part.name for part in parts)
