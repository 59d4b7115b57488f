"""Matrices inside a rank's part of a weight, for optimizers that update whole matrices.

A weight holds one matrix, or several: gate and up projections, the queries, keys and values of
`wqkv`, experts. `pieces` cuts a rank's part of it, flattened, into contiguous pieces that hold
whole matrices, and describes each as stacks of equal matrices by strides; `placed` shares pieces
out to ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from app.plan.model.weight import Weight
from app.plan.shards import Bounds

LARGEST = 2**26  # elements of a piece that can be cut: it is worked on at once

Five = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal matrices within a flat piece: element [e, g, r, i, c] is column c of row i of group r
    of rows of the matrix of expert e, gate or up g.
    """

    offset: int  # of its first element within the piece
    sizes: Five
    strides: Five
    # dimension of the matrices that tensor parallelism divides: 0 rows, 1 columns; None neither
    divided: int | None

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.sizes[0] * self.sizes[1]

    def shape(self, ranks: int = 1) -> tuple[int, int]:
        """Return rows and columns of each matrix put together from the parts of `ranks` ranks."""
        _, _, groups, rows, columns = self.sizes
        rows *= groups * (ranks if self.divided == 0 else 1)
        return rows, columns * (ranks if self.divided == 1 else 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous range of a rank's part of a weight, flattened, that holds whole matrices (or
    whole parts of them, under tensor parallelism).
    """

    bounds: Bounds
    stacks: tuple[Stack, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.bounds[1] - self.bounds[0]


def pieces(weight: Weight, sizes: Sequence[int], most: int) -> Iterator[Piece]:
    """Yield about `most` pieces of a rank's part of a weight, in order, more if they were larger
    than LARGEST; `sizes` are those of its block (`app.plan.sharding.blocks`). A weight is cut
    between experts, or between gate and up; any other is one piece.
    """
    first = sizes[0] if _stacked(weight, 0) else 1
    each = prod(sizes) // first
    step = min(-(-first // most), max(1, LARGEST // each))
    for start in range(0, first, step):
        stop = min(start + step, first)
        inside = (stop - start, *sizes[1:]) if _stacked(weight, 0) else tuple(sizes)
        yield Piece((start * each, stop * each), tuple(_stacks(weight, inside)))


def _stacked(weight: Weight, dim: int) -> bool:
    """Return whether a dimension numbers matrices: experts, or gate and up."""
    return dim in (weight.ep, weight.gate_up)


def _stacks(weight: Weight, sizes: tuple[int, ...]) -> Iterator[Stack]:
    strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    outer = [dim for dim in range(len(sizes)) if _stacked(weight, dim)]
    rows, columns = (dim for dim in range(len(sizes)) if dim not in outer)
    cut = weight.etp if weight.expert else weight.tp
    divided = {rows: 0, columns: 1}.get(-1 if cut is None else cut)
    counts = [(1, 0)] * (2 - len(outer)) + [(sizes[dim], strides[dim]) for dim in outer]
    (experts, expert), (gates, gate) = counts
    fused = weight.fused or (sizes[rows],)
    group = sum(fused)
    start = 0
    for part in fused:
        yield Stack(
            start * strides[rows],
            (experts, gates, sizes[rows] // group, part, sizes[columns]),
            (expert, gate, group * strides[rows], strides[rows], strides[columns]),
            divided,
        )
        start += part


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """Piece of one of several weights, and the rank that updates its matrices."""

    weight: int  # index of the weight
    piece: Piece
    owner: int


def placed(
    weights: Iterable[tuple[Weight, Sequence[int]]], ranks: int, cost: Callable[[Stack], float]
) -> tuple[list[PlacedPiece], list[float]]:
    """Share the pieces of weights, given with the sizes of their blocks, out to `ranks` ranks so
    that the largest sum of costs is small; return them in order, and each rank's cost.

    The costliest piece goes first, each to the rank with the least so far (Graham 1969).
    """
    listed = [
        (index, piece)
        for index, (weight, sizes) in enumerate(weights)
        for piece in pieces(weight, sizes, ranks)
    ]
    costs = [sum(map(cost, piece.stacks)) for _, piece in listed]
    loads = [0.0] * ranks
    owners = [0] * len(listed)
    for place in sorted(range(len(listed)), key=lambda place: -costs[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += costs[place]
    found = zip(listed, owners, strict=True)
    return [PlacedPiece(index, piece, owner) for (index, piece), owner in found], loads
