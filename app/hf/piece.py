"""Boxes of our weights, and where the same elements lie in the tensors of a Hugging Face file.

Both tensors are seen with dimensions taken apart: query, key and value heads, which we keep per
key/value head in one weight of (N + 2G)·H rows, are boxes of G × (N/G + 2) × H × D. A piece is such
a box and the box of theirs that has its elements, whose dimensions may come in another order.
Nothing here holds elements: reading, writing and checking all go by the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from app.plan.sharding.reshard import Block


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one of our weights, and the box with the same elements in one of their tensors."""

    name: str  # of their tensor
    shape: tuple[int, ...]  # of their whole tensor, as in its file
    ours: Block
    theirs: Block
    order: tuple[int, ...]  # for each dimension of ours, which of theirs it is

    @classmethod
    def same(cls, name: str, shape: Sequence[int]) -> Piece:
        """A tensor that both have alike."""
        whole = Block.whole(*shape)
        return cls(name, tuple(shape), whole, whole, tuple(range(len(shape))))

    def within(self, have: Block) -> Cut | None:
        """What of this piece lies in `have`, a block of our weight; None: nothing."""
        held = refined(have, self.ours.shape)
        shared = held.intersection(self.ours)
        return Cut(self, held, shared) if shared.numel else None


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a piece that somebody holds."""

    piece: Piece
    held: Block  # what is held of our weight
    shared: Block  # of that, what belongs to the piece

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it is in what is held."""
        return _slices(self.shared, self.held.start)

    @property
    def region(self) -> tuple[tuple[int, int], ...]:
        """Where it is in their file: from and to, for each dimension of the tensor there."""
        piece = self.piece
        bounds = [(0, 0)] * len(piece.order)
        for mine, other in enumerate(piece.order):
            shift = piece.theirs.start[other] - piece.ours.start[mine]
            bounds[other] = (self.shared.start[mine] + shift, self.shared.stop[mine] + shift)
        return tuple(
            _range([(bounds[dim], piece.theirs.shape[dim]) for dim in dims])
            for dims in grouped(piece.shape, piece.theirs.shape)
        )

    @property
    def their_sizes(self) -> tuple[int, ...]:
        """Shape of the part with their dimensions taken apart."""
        sizes = [0] * len(self.piece.order)
        for mine, other in enumerate(self.piece.order):
            sizes[other] = self.shared.sizes[mine]
        return tuple(sizes)


def refined(block: Block, shape: tuple[int, ...]) -> Block:
    """The same block of a tensor whose dimensions are taken apart so that it has this shape.

    AssertionError where the block cuts through what stays together: a head.
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
    """For each dimension of `shape`, the dimensions of `apart` that it is taken apart into."""
    assert prod(shape) == prod(apart), f"{apart} are not the dimensions of {shape}"
    groups: list[list[int]] = []
    dims = iter(range(len(apart)))
    for size in shape:
        group = [next(dims)]
        while prod(apart[dim] for dim in group) != size:
            group.append(next(dims))
        groups.append(group)
    groups[-1] += dims  # of size 1
    return groups


def _range(parts: list[tuple[tuple[int, int], int]]) -> tuple[int, int]:
    """From and to in a dimension, of bounds and sizes of what it is taken apart into."""
    low = high = 0
    several = False  # of an outer part, so that the inner ones have to be whole
    for (start, stop), size in parts:
        assert not several or (start, stop) == (0, size), "not one range of the file's dimension"
        low = low * size + start
        high = high * size + stop - 1
        several = several or stop - start > 1
    return low, high + 1


def _slices(block: Block, origin: tuple[int, ...]) -> tuple[slice, ...]:
    bounds = zip(block.start, block.stop, origin, strict=True)
    return tuple(slice(low - at, high - at) for low, high, at in bounds)


def names(pieces: Sequence[Piece]) -> Iterator[str]:
    """Their tensors, each once, in order."""
    yield from dict.fromkeys(piece.name for piece in pieces)
