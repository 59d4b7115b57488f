"""The optimizers: their shards by the names in `app.plan.sharding.optimizers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from app.choices import MomentDtype, OptimizerKind
from app.config import OptimConfig
from app.optim.adam import AdamShard
from app.optim.grad_buckets import GradBuckets
from app.optim.muon import MuonShard
from app.optim.shard import OptimizerGroups, Shard, Update
from app.plan.sharding.optimizers import moment_dtype

SHARDS: Mapping[OptimizerKind, type[Shard]] = MappingProxyType(
    {kind.kind: kind for kind in (AdamShard, MuonShard)}
)

# None: the dtype of main parameters
MOMENTS = MappingProxyType({MomentDtype.fp32: None, MomentDtype.bf16: torch.bfloat16})


def shards_of(buckets: GradBuckets, config: OptimConfig) -> Iterator[Shard]:
    """Build this rank's shards of a buffer's buckets."""
    for bucket, kind in enumerate(buckets.buffer.layout.optimizers):
        yield SHARDS[kind](
            buckets.buffer, bucket, buckets.group, MOMENTS[moment_dtype(kind, config)]
        )


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
