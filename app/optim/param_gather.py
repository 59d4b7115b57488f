"""All-gathers of parameters, bucket by bucket, after every rank has updated its shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from app.collectives import all_gather
from app.optim.shard import Shard


class ParamGather:
    """State of each parameter bucket on this rank, and its all-gather.

    =========  ===============  ==============================  ===============  ===================
    a bucket   its shards will  all ranks have updated their    work that reads  its parameters are
    is         change (`wait`)  shards (`updated`)              it has begun     needed
                                                                (`start`)        (`ensure_gathered`)
    =========  ===============  ==============================  ===============  ===================
    gathered   nothing          `at_update` starts: in flight;  nothing          nothing
                                otherwise: stale
    stale      nothing          stale                           starts: in       gathers: gathered
                                                                flight
    in flight  waits: gathered  bug                             nothing          waits: gathered
    =========  ===============  ==============================  ===============  ===================

    Captured work (`in_graph`) gathers every bucket, so all are marked stale before it; afterwards
    all are gathered, or stale if the work ends with an update. A replay runs the all-gathers
    without calling these methods. An all-gather started before such work cannot be waited for
    within it, nor one started within it afterwards: bugs.

    A bug is an AssertionError. In a group of one rank nothing is ever in flight: a bucket is
    gathered again at once.
    """

    def __init__(self, shards: Sequence[Shard], at_update: bool) -> None:
        self.at_update = at_update  # all-gathers start after the update and overlap what follows
        self._shards = tuple(shards)
        self._shard_of = {
            spec.param: shard
            for shard in shards
            for spec, _ in shard.buffer.of_bucket(shard.bucket)
        }
        self._stale: set[Shard] = set()
        self._in_flight: dict[Shard, dist.Work] = {}

    def wait(self, shard: Shard) -> None:
        """Wait for all-gathers that read and write the shard, before it changes."""
        if shard in self._in_flight:
            self._in_flight.pop(shard).wait()

    def updated(self, shard: Shard) -> None:
        """Note that all ranks have updated their shards of a bucket."""
        assert shard not in self._in_flight, "the all-gather of this shard has not finished"
        self._stale.add(shard)
        if self.at_update:
            self.start(shard)

    def start(self, shard: Shard) -> None:
        """Note that work has begun that will read the parameters of a bucket."""
        if shard not in self._stale:
            return
        self._stale.remove(shard)
        work = all_gather(shard.params, shard.own_params, shard.group, wait=False)
        if work is not None:
            self._in_flight[shard] = work

    def ensure_gathered(self, shard: Shard) -> None:
        """Wait for a bucket's all-gather; run it first if it has not started."""
        if shard in self._stale:
            self._stale.remove(shard)
            all_gather(shard.params, shard.own_params, shard.group)
        self.wait(shard)

    @contextmanager
    def in_graph(self, updates: bool) -> Iterator[None]:
        """Capture or replay work within the block that gathers all buckets and then `updates` their
        shards or not.
        """
        assert not self._in_flight, "captured work cannot wait for an all-gather started before it"
        self._stale.update(self._shards)
        yield
        assert not self._in_flight, "captured work must wait for the all-gathers it starts"
        if not updates:
            self._stale.clear()

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[..., None]:
        """Return a pre-hook of modules that waits until these parameters are gathered."""
        shards = list(dict.fromkeys(self._shard_of[param] for param in params))

        def wait(*_: object) -> None:
            if self._stale or self._in_flight:  # cheap check: it runs in every forward
                for shard in shards:
                    self.ensure_gathered(shard)

        return wait
