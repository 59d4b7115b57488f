"""Overlaps between the shards of one layout and those of another.

A parameter is divided twice. Tensor and expert parallelism give a rank a *block* of the global
tensor; data parallelism then gives it a contiguous *part* of that block, flattened row by row, for
the optimizer's state. `overlaps` intersects two such slices of one global tensor. All numbers are
elements, not bytes.

A block that is not one range of rows or columns becomes one in a global shape with one dimension
more. A SwiGLU's first matrix of shape [2F, D] holds the gate's rows, then the up projection's, and
each is divided for itself: (2, F, D) along 1. Stacked experts, [E, D, 2F], are divided along 0 by
expert and along 3 by width as (E, D, 2, F).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from app.plan.shards import Bounds


@dataclass(frozen=True, slots=True)
class Block:
    """Box of a global tensor, [start, stop) along every dimension, held contiguous."""

    shape: tuple[int, ...]  # of the global tensor
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, *shape: int) -> Block:
        """Return the block that is a whole tensor of this shape."""
        return cls(shape, (0,) * len(shape), shape)

    def cut(self, dim: int, parts: int, index: int) -> Block:
        """Return part `index` of `parts` equal ones along `dim`.

        Cuts along other dimensions can follow. Raises ValueError for a dimension that does not
        divide and for an index outside the parts.
        """
        if not 0 <= index < parts:
            raise ValueError(f"part {index} is outside the {parts} parts")
        extent = self.sizes[dim]
        if extent % parts:
            raise ValueError(
                f"{extent} elements along dimension {dim} do not divide into {parts} parts"
            )
        low = self.start[dim] + extent // parts * index
        return replace(
            self, start=_put(self.start, dim, low), stop=_put(self.stop, dim, low + extent // parts)
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Elements of the box."""
        return prod(self.sizes)

    def intersection(self, other: Block) -> Block:
        """Return the box that both hold, maybe empty.

        ValueError if the global tensors differ in shape.
        """
        if self.shape != other.shape:
            raise ValueError(
                f"blocks of a tensor of shape {self.shape} and of one of shape {other.shape}"
            )
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Block(self.shape, start, tuple(map(max, start, stop)))


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Slice:
    """One rank's share of a parameter: a block, or a part of it."""

    block: Block
    part: Bounds | None = None  # of the flattened block; None: all of it

    @property
    def bounds(self) -> Bounds:
        """The part, as a range of the flattened block."""
        return (0, self.block.numel) if self.part is None else self.part


class Overlap(NamedTuple):
    """Elements that two slices share, as ranges of equal length from the start of each."""

    have: Bounds
    want: Bounds


def overlaps(have: Slice, want: Slice) -> Iterator[Overlap]:
    """Yield the runs of elements that both hold, ascending on both sides.

    There is one run if both divide rows, one per row if a side divides columns. Runs before the
    parts are skipped by bisection, so that time grows with the number of runs found. Raises
    ValueError if the global tensors differ in shape.
    """
    runs = _shared_runs(have.block, want.block)
    (begin, end), (begin_want, end_want) = have.bounds, want.bounds

    def reaches_both(run: int) -> bool:
        at, at_want = runs.start(run)
        return at + runs.length > begin and at_want + runs.length > begin_want

    for run in range(bisect_left(range(runs.count), True, key=reaches_both), runs.count):
        at, at_want = runs.start(run)
        low = max(0, begin - at, begin_want - at_want)
        high = min(runs.length, end - at, end_want - at_want)
        if low >= high:  # one of the parts has ended, or nothing is shared
            return
        yield Overlap(
            (at + low - begin, at + high - begin),
            (at_want + low - begin_want, at_want + high - begin_want),
        )


@dataclass(frozen=True, slots=True)
class _Runs:
    """Elements that two blocks share, as `count` runs of `length` in each flattened block."""

    length: int
    first: tuple[int, int]  # start of the first run on both sides
    # dimensions that the runs are stacked along: size, stride on both sides
    outer: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """Number of runs."""
        return prod(size for size, _, _ in self.outer)

    def start(self, run: int) -> tuple[int, int]:
        """Return the first element of a run on both sides; ascending in `run`."""
        have, want = self.first
        for size, stride, stride_want in reversed(self.outer):
            run, index = divmod(run, size)
            have = have + index * stride
            want = want + index * stride_want
        return have, want


def _shared_runs(have: Block, want: Block) -> _Runs:
    shared = have.intersection(want)
    # first dimension within a run: later ones are whole on both sides
    inner = max(len(shared.sizes) - 1, 0)
    while inner > 0 and have.sizes[inner] == want.sizes[inner] == shared.sizes[inner]:
        inner -= 1
    (first, strides), (first_want, strides_want) = (_place(shared, block) for block in (have, want))
    outer = tuple(zip(shared.sizes[:inner], strides[:inner], strides_want[:inner], strict=True))
    return _Runs(prod(shared.sizes[inner:]), (first, first_want), outer)


def _place(inside: Block, block: Block) -> tuple[int, list[int]]:
    """Return the first element of a block within a larger one, flattened, and the latter's
    strides.
    """
    strides = [prod(block.sizes[dim + 1 :]) for dim in range(len(block.sizes))]
    offsets = (low - start for low, start in zip(inside.start, block.start, strict=True))
    return sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)), strides
