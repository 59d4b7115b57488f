"""The optimizers: their shards by the names in `app.plan.sharding.optimizers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from app.choices import OptimizerKind
from app.config import OptimConfig
from app.optim.adam import AdamShard
from app.optim.grad_buckets import GradBuckets
from app.optim.muon import MuonShard
from app.optim.shard import OptimizerGroups, Shard, Update

SHARDS: Mapping[OptimizerKind, type[Shard]] = MappingProxyType(
    {kind.kind: kind for kind in (AdamShard, MuonShard)}
)


def shards_of(buckets: GradBuckets) -> Iterator[Shard]:
    """Build this rank's shards of a buffer's buckets."""
    for bucket, kind in enumerate(buckets.buffer.layout.optimizers):
        yield SHARDS[kind](buckets.buffer, bucket, buckets.group)


def updates_of(
    shards: Sequence[Shard], config: OptimConfig, groups: OptimizerGroups
) -> list[Update]:
    """Return the updates of shards, which are given in the order of use; AdamW's come first."""
    found: list[Update] = []
    for kind in SHARDS.values():
        found += kind.updates(
            [shard for shard in shards if isinstance(shard, kind)], config, groups
        )
    return found
