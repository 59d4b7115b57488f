"""Layout of parameters in contiguous buffers, and the shard of each data-parallel rank.

Parameters are laid out in reverse registration order, roughly the order in which backward finishes
their gradients, so that the first bucket is complete first. A bucket is a contiguous part of the
buffer that is reduced and gathered as one. It is padded to a multiple of lcm(world, shard_align)
and divided into `world` equal shards, shard r for rank r (ZeRO stage 1, Rajbhandari et al. 2020).
All numbers are elements, not bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

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
) -> BufferLayout:
    """Lay out parameters of the given sizes (elements, registration order) over `world` ranks.

    A bucket is closed when it holds bucket_numel elements (None: one bucket), and before and after
    each parameter in `alone` (indices), so that its shards depend on its size alone. Every
    parameter starts at a multiple of param_align; every bucket ends at a multiple of lcm(world,
    shard_align). Raises ValueError for sizes below 0 and for any other argument below 1.
    """
    _check(numels, world, bucket_numel, param_align=param_align, shard_align=shard_align)
    params: list[Bounds] = []
    bucket_of: list[int] = []
    buckets: list[Bounds] = []
    used: list[int] = []
    bucket_start = start = 0
    for left, numel in reversed(list(enumerate(numels))):
        start = _round_up(start, param_align)
        end = start + numel
        params.append((start, end))
        bucket_of.append(len(buckets))
        start = end
        full = bucket_numel is not None and end - bucket_start >= bucket_numel
        if full or left == 0 or left in alone or left - 1 in alone:
            used.append(end - bucket_start)
            start = _round_up(end, lcm(world, shard_align))
            buckets.append((bucket_start, start))
            bucket_start = start
    return BufferLayout(
        world,
        tuple(reversed(params)),
        tuple(reversed(bucket_of)),
        buckets=tuple(buckets),
        bucket_used=tuple(used),
    )


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
