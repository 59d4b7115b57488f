"""Layout of parameters in contiguous buffers, and the shard of each data-parallel rank.

Parameters are laid out in reverse registration order, roughly the order in which backward finishes
their gradients, so that the first bucket is complete first. A bucket is a contiguous part of the
buffer that is reduced and gathered as one. It is padded to a multiple of lcm(world, shard_align)
and divided into `world` equal shards, shard r for rank r (ZeRO stage 1, Rajbhandari et al. 2020).
All numbers are elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from app.choices import OptimizerKind

Bounds = tuple[int, int]  # [start, end)


class Range(NamedTuple):
    """Part of a parameter that a rank owns: three ranges [start, end) of equal length."""

    bucket: int  # index of the bucket that holds the parameter
    world: Bounds  # in the whole buffer
    local: Bounds  # in the rank's shard of that bucket
    param: Bounds  # in the flattened parameter


@dataclass(frozen=True)
class BufferLayout:
    """Layout of one buffer: a value that optimizer, checkpoints and the memory plan share.

    Bucket starts are multiples of `world`, so a rank's shards laid end to end put bucket b at
    buckets[b][0] // world.
    """

    world: int  # ranks that share the buffer
    params: tuple[Bounds, ...]  # place of each parameter, in registration order
    bucket_of: tuple[int, ...]  # bucket of each parameter, in registration order
    buckets: tuple[Bounds, ...]  # buckets with their padding; they tile the buffer
    bucket_used: tuple[int, ...]  # elements of each bucket before the padding at its end
    optimizers: tuple[OptimizerKind, ...]  # optimizer of each bucket's parameters

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included; divisible by `world`."""
        return self.buckets[-1][1] if self.buckets else 0

    def shard(self, bucket: int, rank: int) -> Bounds:
        """Return the place in the buffer of `rank`'s shard of `bucket`.

        ValueError for a rank outside the world.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside the {self.world} ranks that share the buffer")
        start, end = self.buckets[bucket]
        size = (end - start) // self.world
        return start + rank * size, start + (rank + 1) * size

    def owned(self, optimizer: OptimizerKind) -> int:
        """Return the elements, padding included, that each rank updates with this optimizer."""
        sizes = zip(self.buckets, self.optimizers, strict=True)
        return sum(end - start for (start, end), kind in sizes if kind is optimizer) // self.world

    def ranges(self, rank: int) -> list[list[Range]]:
        """Return what `rank` owns of each parameter, in registration order: at most one range."""
        shards = [self.shard(bucket, rank) for bucket in range(len(self.buckets))]
        return [
            _overlap(place, bucket, shards[bucket])
            for place, bucket in zip(self.params, self.bucket_of, strict=True)
        ]


def _overlap(place: Bounds, bucket: int, shard: Bounds) -> list[Range]:
    start = max(place[0], shard[0])
    end = min(place[1], shard[1])
    if start >= end:
        return []
    return [
        Range(
            bucket,
            (start, end),
            (start - shard[0], end - shard[0]),
            param=(start - place[0], end - place[0]),
        )
    ]


def buffer_layout(
    numels: Sequence[int],
    world: int,
    *,
    bucket_numel: int | None = None,
    param_align: int = 1,
    shard_align: int = 1,
    alone: Collection[int] = (),
    optimizers: Sequence[OptimizerKind] | None = None,
) -> BufferLayout:
    """Lay out parameters of the given sizes (elements, registration order) over `world` ranks.

    A bucket is closed when it holds bucket_numel elements (None: one bucket), and before and after
    each parameter in `alone` (indices), so that its shards depend on its size alone. Every
    parameter starts at a multiple of param_align; every bucket ends at a multiple of lcm(world,
    shard_align). A bucket holds parameters of one of the `optimizers` (one per parameter; None:
    AdamW updates all), and buckets lie in the order in which their last parameters come. Raises
    ValueError for sizes below 0 and for any other argument below 1.
    """
    _check(numels, world, bucket_numel, param_align=param_align, shard_align=shard_align)
    kinds = optimizers or [OptimizerKind.adamw] * len(numels)
    filling = _Filling(numels, param_align, lcm(world, shard_align))
    for left in reversed(range(len(numels))):
        kind = kinds[left]
        if left in alone:
            filling.close(kind)
        filling.add(left, kind)
        if left in alone or (bucket_numel is not None and filling.used(kind) >= bucket_numel):
            filling.close(kind)
    for kind in sorted(filling.open, key=lambda kind: -filling.open[kind].members[-1]):
        filling.close(kind)
    order = range(len(numels))
    return BufferLayout(
        world,
        tuple(filling.places[left] for left in order),
        tuple(filling.bucket_of[left] for left in order),
        buckets=tuple(filling.buckets),
        bucket_used=tuple(filling.bucket_used),
        optimizers=tuple(filling.optimizers),
    )


@dataclass(slots=True)
class _OpenBucket:
    """Bucket that still takes parameters."""

    start: int  # in the buffer, if no other bucket is closed before it
    end: int  # of its last parameter
    members: list[int] = field(default_factory=list)  # parameters, in the order of the buffer


@dataclass(slots=True)
class _Filling:
    """Buckets closed so far, and one open bucket per optimizer."""

    numels: Sequence[int]
    param_align: int
    bucket_align: int
    end: int = 0  # of the last closed bucket
    open: dict[OptimizerKind, _OpenBucket] = field(default_factory=dict)
    places: dict[int, Bounds] = field(default_factory=dict)  # parameter: place in the buffer
    bucket_of: dict[int, int] = field(default_factory=dict)
    buckets: list[Bounds] = field(default_factory=list)
    bucket_used: list[int] = field(default_factory=list)
    optimizers: list[OptimizerKind] = field(default_factory=list)

    def add(self, left: int, kind: OptimizerKind) -> None:
        """Append a parameter to the open bucket of its optimizer."""
        bucket = self.open.setdefault(kind, _OpenBucket(self.end, self.end))
        bucket.members.append(left)
        bucket.end = _round_up(bucket.end, self.param_align) + self.numels[left]

    def used(self, kind: OptimizerKind) -> int:
        """Return the elements of the optimizer's open bucket."""
        return self.open[kind].end - self.open[kind].start

    def close(self, kind: OptimizerKind) -> None:
        """Place the optimizer's open bucket, if any, behind the closed ones."""
        bucket = self.open.pop(kind, None)
        if bucket is None:
            return
        start = end = self.end
        for left in bucket.members:
            first = _round_up(end, self.param_align)
            end = first + self.numels[left]
            self.places[left] = first, end
            self.bucket_of[left] = len(self.buckets)
        self.end = _round_up(end, self.bucket_align)
        self.buckets.append((start, self.end))
        self.bucket_used.append(end - start)
        self.optimizers.append(kind)


def shard_map(
    numels: Sequence[int],
    world: int,
    rank: int,
    *,
    bucket_numel: int | None = None,
    param_align: int = 1,
    shard_align: int = 1,
) -> list[list[Range]]:
    """Return what `rank` owns of each parameter, in registration order.

    Arguments as in `buffer_layout`. For other programs; this one uses `BufferLayout` directly.
    """
    return buffer_layout(
        numels, world, bucket_numel=bucket_numel, param_align=param_align, shard_align=shard_align
    ).ranges(rank)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _check(
    numels: Sequence[int], world: int, bucket_numel: int | None, param_align: int, shard_align: int
) -> None:
    bounds = {
        "world": world,
        "bucket_numel": bucket_numel,
        "param_align": param_align,
        "shard_align": shard_align,
    }
    for name, value in bounds.items():
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if any(numel < 0 for numel in numels):
        raise ValueError(f"a parameter cannot have {min(numels)} elements")
