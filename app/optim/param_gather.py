"""Parameters of which every rank has updated its shard are made whole again, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist
from torch import nn

from app.collectives import all_gather
from app.optim.adam import AdamShard


class ParamGather:
    """Which buckets of parameters are not whole on this rank, and their all-gathers.

    ============  ===================  ============================  ================
    a bucket is   its shards will      all ranks have updated their  its parameters
                  change (`settle`)    shards (`updated`)            are needed
                                                                     (`make_whole`)
    ============  ===================  ============================  ================
    whole         nothing              `overlaps`: starts: on its    nothing
                                       way; otherwise: stale
    stale         nothing              stale                         gathers: whole
    on its way    waits: whole         bug                           waits: whole
    ============  ===================  ============================  ================

    A bug is an AssertionError. Over a single rank nothing is on its way: a bucket is whole again at
    once.
    """

    def __init__(self, shards: Sequence[AdamShard], overlaps: bool) -> None:
        self.overlaps = overlaps  # all-gathers run beside what follows an update
        self._shard_of = {
            spec.param: shard
            for shard in shards
            for spec, _ in shard.buffer.of_bucket(shard.bucket)
        }
        self._stale: set[AdamShard] = set()
        self._on_its_way: dict[AdamShard, dist.Work] = {}

    def settle(self, shard: AdamShard) -> None:
        """The shard will change: what still reads it, and writes it, has to end first."""
        if shard in self._on_its_way:
            self._on_its_way.pop(shard).wait()

    def updated(self, shard: AdamShard) -> None:
        """All ranks have updated their shards of a bucket."""
        if not self.overlaps:
            self._stale.add(shard)
            return
        assert shard not in self._on_its_way, "its gather still reads and writes the shard"
        work = all_gather(shard.params, shard.own_params, shard.group, wait=False)
        if work is not None:
            self._on_its_way[shard] = work

    def make_whole(self, shard: AdamShard) -> None:
        """The parameters of a bucket are needed."""
        if shard in self._stale:
            self._stale.remove(shard)
            all_gather(shard.params, shard.own_params, shard.group)
        self.settle(shard)

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[[], None]:
        """A function that makes these parameters whole."""
        shards = list(dict.fromkeys(self._shard_of[param] for param in params))

        def wait() -> None:
            if self._stale or self._on_its_way:  # else this costs a forward next to nothing
                for shard in shards:
                    self.make_whole(shard)

        return wait
