"""All-gathers of parameters, bucket by bucket, after every rank has updated its shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from app.collectives import all_gather
from app.optim.adam import AdamShard


class ParamGather:
    """State of each parameter bucket on this rank, and its all-gather; "whole" means gathered.

    ============  ===================  ============================  ================  ============
    a bucket is   its shards will      all ranks have updated their  work that reads   its
                  change (`settle`)    shards (`updated`)            it has begun      parameters
                                                                     (`start`)         are needed
                                                                                       (`make_whole`)
    ============  ===================  ============================  ================  ============
    whole         nothing              `at_update`: starts: on its   nothing           nothing
                                       way; otherwise: stale
    stale         nothing              stale                         starts: on its    gathers:
                                                                     way               whole
    on its way    waits: whole         bug                           nothing           waits: whole
    ============  ===================  ============================  ================  ============

    Captured work (`in_graph`) treats every bucket as stale, and leaves it whole, or stale if it
    ends with an update: the graph must gather whatever a later update will have changed, and its
    kernels gather in each replay, where none of these methods are called. An all-gather started
    before such work cannot be waited for within it, nor one started within it afterwards: bugs.

    A bug is an AssertionError. In a group of one rank nothing is ever on its way: a bucket is whole
    again at once.
    """

    def __init__(self, shards: Sequence[AdamShard], at_update: bool) -> None:
        self.at_update = at_update  # all-gathers start after the update and overlap what follows
        self._shards = tuple(shards)
        self._shard_of = {
            spec.param: shard
            for shard in shards
            for spec, _ in shard.buffer.of_bucket(shard.bucket)
        }
        self._stale: set[AdamShard] = set()
        self._on_its_way: dict[AdamShard, dist.Work] = {}

    def settle(self, shard: AdamShard) -> None:
        """Wait for all-gathers that read and write the shard, before it changes."""
        if shard in self._on_its_way:
            self._on_its_way.pop(shard).wait()

    def updated(self, shard: AdamShard) -> None:
        """Note that all ranks have updated their shards of a bucket."""
        assert shard not in self._on_its_way, "the all-gather of this shard has not finished"
        self._stale.add(shard)
        if self.at_update:
            self.start(shard)

    def start(self, shard: AdamShard) -> None:
        """Note that work has begun that will read the parameters of a bucket."""
        if shard not in self._stale:
            return
        self._stale.remove(shard)
        work = all_gather(shard.params, shard.own_params, shard.group, wait=False)
        if work is not None:
            self._on_its_way[shard] = work

    def make_whole(self, shard: AdamShard) -> None:
        """Complete the parameters of a bucket now."""
        if shard in self._stale:
            self._stale.remove(shard)
            all_gather(shard.params, shard.own_params, shard.group)
        self.settle(shard)

    @contextmanager
    def in_graph(self, updates: bool) -> Iterator[None]:
        """Capture or replay work within the block that gathers all buckets and then `updates` their
        shards or not.
        """
        assert not self._on_its_way, "captured work cannot wait for an all-gather started before it"
        self._stale.update(self._shards)
        yield
        assert not self._on_its_way, "captured work must wait for the all-gathers it starts"
        if not updates:
            self._stale.clear()

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[[], None]:
        """Return a function that completes these parameters."""
        shards = list(dict.fromkeys(self._shard_of[param] for param in params))

        def wait() -> None:
            if self._stale or self._on_its_way:  # cheap check: it runs in every forward
                for shard in shards:
                    self.make_whole(shard)

        return wait
