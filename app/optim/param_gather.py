"""Parameters of which every rank has updated its shard are made whole again, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from app.collectives import all_gather
from app.optim.adam import AdamShard


class ParamGather:
    """Which buckets of parameters are not whole on this rank, and their all-gathers.

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

    Work that is recorded and replayed (`in_graph`) finds every bucket stale, and leaves it whole,
    or stale where it ends with an update: a recording has to gather what a later update will have
    changed, whatever was whole when it was made, and its kernels gather in a replay, where none of
    this is called. What is on its way before such work cannot be waited for in it, nor behind it
    what has started in it: bugs.

    A bug is an AssertionError. Over a single rank nothing is on its way: a bucket is whole again at
    once.
    """

    def __init__(self, shards: Sequence[AdamShard], at_update: bool) -> None:
        self.at_update = at_update  # all-gathers start there, and run beside what follows
        self._shards = tuple(shards)
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
        assert shard not in self._on_its_way, "its gather still reads and writes the shard"
        self._stale.add(shard)
        if self.at_update:
            self.start(shard)

    def start(self, shard: AdamShard) -> None:
        """Work has begun that reads the parameters of a bucket."""
        if shard not in self._stale:
            return
        self._stale.remove(shard)
        work = all_gather(shard.params, shard.own_params, shard.group, wait=False)
        if work is not None:
            self._on_its_way[shard] = work

    def make_whole(self, shard: AdamShard) -> None:
        """The parameters of a bucket are needed."""
        if shard in self._stale:
            self._stale.remove(shard)
            all_gather(shard.params, shard.own_params, shard.group)
        self.settle(shard)

    @contextmanager
    def in_graph(self, updates: bool) -> Iterator[None]:
        """Within the block work is recorded or replayed that gathers all buckets, and behind that
        `updates` their shards or not.
        """
        assert not self._on_its_way, "a recording cannot wait for what has started before it"
        self._stale.update(self._shards)
        yield
        assert not self._on_its_way, "a recording has to wait for what it starts"
        if not updates:
            self._stale.clear()

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[[], None]:
        """A function that makes these parameters whole."""
        shards = list(dict.fromkeys(self._shard_of[param] for param in params))

        def wait() -> None:
            if self._stale or self._on_its_way:  # else this costs a forward next to nothing
                for shard in shards:
                    self.make_whole(shard)

        return wait
