"""Gradient buckets of one flat buffer on one rank: arrivals are counted, full buckets reduced.

As in PyTorch's DistributedDataParallel (Li et al. 2020) a bucket is sent when its last gradient has
arrived, overlapping the rest of backward, and always after the bucket before it, so that all ranks
send in one order. Here each is a reduce-scatter, which leaves every rank its shard of the sum
(ZeRO).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.collectives import reduce_scatter
from app.model.layers.weight_grads import WeightGrad
from app.optim.buffers import FlatBuffer


class GradState(Enum):
    """State of a buffer's gradients within a step."""

    accumulating = "accumulating"  # microbatches' gradients are accumulated
    expecting = "expecting"  # the step's last backward: arriving gradients are a parameter's last
    reducing = "reducing"  # the reduce-scatters of all buckets have begun
    reduced = "reduced"  # this rank's shards hold sums over all ranks


class Arrival(NamedTuple):
    """Gradient that has been added to a parameter's main gradient, and its bucket."""

    buckets: GradBuckets
    bucket: int


class GradBuckets:
    """The buckets of a flat buffer, which gradients each still misses, and their reduce-scatters.

    `arrive` runs once per parameter and microbatch; twice for a tied table under split backward.
    Three callers: an autograd hook on every parameter; `add`, which takes a gradient from a
    weight-gradient sink during backward or from a deferred `BackwardWeight` after it; and
    `DistributedOptimizer.count_listed` after a replay, for the arrivals that were listed when its
    graph was recorded.

    ============  ============  ===============  ===============  ===============  ================
    state         zero          expect_last      arrive           reduce           finish
    ============  ============  ===============  ===============  ===============  ================
    accumulating  clears        expecting [1]    nothing          starts all:      starts all,
                                                                  reducing         waits: reduced
    expecting     bug           bug              counts [2]       starts the       starts the rest,
                                                                  rest: reducing   waits: reduced
    reducing      bug           bug              bug              nothing          waits: reduced
    reduced       clears:       bug              bug              bug              bug
                  accumulating
    ============  ============  ===============  ===============  ===============  ================

    [1] With `overlaps`; otherwise it stays accumulating, and reduce-scatters are synchronous. A
    split backward expects nothing (`last_backwards`), and is reduced at its end as well.
    [2] Complete buckets start in order; after the last one the state is reducing. More gradients
    than a bucket has parameters are a bug.

    With `writes_first`, main gradients are not cleared: the first gradient of a step overwrites
    them, and those without a gradient are cleared before they are reduced. This is impossible if
    one captured graph serves the first microbatch and others.

    A bug is an AssertionError. While arrivals are listed, `arrive` lists in every state.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        group: dist.ProcessGroup,
        overlaps: bool,
        *,
        writes_first: bool = False,
    ) -> None:
        self.buffer = buffer
        self.group = group
        self.overlaps = overlaps  # reduce-scatters overlap the rest of backward
        self.writes_first = writes_first
        self._unwritten: set[nn.Parameter] = set()  # main gradients still hold the previous step's
        self.state = GradState.accumulating
        layout = buffer.layout
        rank = group.rank()
        self.num_buckets = len(layout.buckets)
        self._whole = [buffer.grads[start:stop] for start, stop in layout.buckets]
        shards = (layout.shard(bucket, rank) for bucket in range(self.num_buckets))
        self._shards = [buffer.grads[start:stop] for start, stop in shards]
        self._params_in = Counter(layout.bucket_of)
        self._missing = Counter[int]()  # gradients of each bucket still to come, while expecting
        self._started = 0  # buckets whose reduce-scatter has begun
        self._works: list[dist.Work] = []
        self._streams: set[torch.cuda.Stream] = set()  # on which expected gradients were added
        self._listing = False  # arrivals are listed instead of counted, for a graph's replay
        self._listed: list[Arrival] = []
        self._sums: dict[nn.Parameter, tuple[int, Tensor]] = {}  # bucket, and main gradient
        for (spec, total), bucket in zip(buffer.grad_views(), layout.bucket_of, strict=True):
            self._sums[spec.param] = bucket, total
            self._hook(spec.param, bucket, total)

    def zero(self) -> None:
        """Clear the main gradients before the first backward of a step, or with `writes_first` mark
        them to be overwritten.
        """
        assert self.state in (GradState.accumulating, GradState.reduced), (
            "the previous step has not been finished"
        )
        if self.writes_first:
            self._unwritten.update(self._sums)
        else:
            self.buffer.grads.zero_()
        self.state = GradState.accumulating

    def written(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and main gradient of every parameter with a gradient since `zero`."""
        for spec, total in self.buffer.grad_views():
            if spec.param not in self._unwritten:
                yield spec.name, total

    def expect_last(self) -> None:
        """Announce the step's last backward: each gradient completes its parameter's main
        gradient.
        """
        assert self.state is GradState.accumulating, f"a backward after the last: {self.state}"
        if self.overlaps:
            self._missing = self._params_in.copy()
            self.state = GradState.expecting

    def add(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add a gradient that does not come from autograd to its main gradient."""
        bucket, total = self._sums[param]
        if param in self._unwritten:
            self._unwritten.remove(param)
            gradient.write_to(total)
        else:
            gradient.add_to(total)
        self.arrive(bucket)

    def arrive(self, bucket: int) -> None:
        """Record that a gradient has been added to the main gradient of one of the bucket's
        parameters.
        """
        if self._listing:
            self._listed.append(Arrival(self, bucket))
            return
        match self.state:
            case GradState.accumulating:
                pass
            case GradState.expecting:
                self._count(bucket)
            case GradState.reducing | GradState.reduced:
                raise AssertionError(f"a gradient came too late for its bucket: {self.state}")

    def list_arrivals(self, into: list[Arrival]) -> None:
        """Append arrivals to `into` from here on: a graph is being captured or replayed."""
        self._listing = True
        self._listed = into

    def stop_listing(self) -> None:
        """Count arrivals again."""
        self._listing = False
        self._listed = []

    def reduce(self) -> None:
        """Start the reduce-scatters that have not begun."""
        assert self.state is not GradState.reduced, "the gradients have been reduced already"
        while self._started < self.num_buckets:
            self._start_next()

    def finish(self) -> None:
        """Start the reduce-scatters that have not begun, and wait for all."""
        self.reduce()
        for work in self._works:
            work.wait()
        self._works.clear()
        self._streams.clear()
        self._started = 0
        self.state = GradState.reduced

    def _count(self, bucket: int) -> None:
        """Count an arrival and start the buckets that are complete, in order."""
        assert self._missing[bucket] > 0, f"one gradient too many in bucket {bucket}"
        self._missing[bucket] -= 1
        if self.buffer.grads.is_cuda:
            self._streams.add(torch.cuda.current_stream())
        while self._started < self.num_buckets and not self._missing[self._started]:
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._started
        self._started += 1
        self._clear_unwritten(bucket)
        for stream in self._streams:  # autograd adds a gradient on the stream of the forward
            torch.cuda.current_stream().wait_stream(stream)
        work = reduce_scatter(
            self._shards[bucket], self._whole[bucket], self.group, wait=not self.overlaps
        )
        if work is not None:
            self._works.append(work)
        if self._started == self.num_buckets:
            self.state = GradState.reducing

    def _clear_unwritten(self, bucket: int) -> None:
        """Clear main gradients for which no gradient has arrived in this step."""
        for param in [*self._unwritten]:
            of, total = self._sums[param]
            if of == bucket:
                total.zero_()
                self._unwritten.remove(param)

    def _hook(self, param: nn.Parameter, bucket: int, total: Tensor) -> None:
        """Register a hook that counts each gradient autograd has accumulated for the parameter; if
        the main gradient has another dtype, the hook first adds to it.

        torch also calls the hook for a weight whose gradient a sink has taken. With main gradients
        of another dtype, `param.grad` is None then, and nothing arrives. If autograd accumulates
        into the main gradient itself, `param.grad` is always set, and the call would count one
        arrival too many. That never happens: there only a split backward has a sink
        (`main_grad_sink`), and of that no arrivals are expected (`last_backwards`).
        """
        # weak reference: torch stores hooks where the garbage collector cannot see a cycle
        here = weakref.ref(self)
        autograd_adds, unwritten = self.buffer.autograd_adds, self._unwritten

        def accumulated(param: nn.Parameter) -> None:
            if not autograd_adds:
                if param.grad is None:  # a sink has taken it
                    return
                if param in unwritten:
                    unwritten.remove(param)
                    total.copy_(param.grad)
                else:
                    total.add_(param.grad)
                param.grad = None
            buckets = here()
            assert buckets is not None, "the buckets must outlive the hooks of their parameters"
            buckets.arrive(bucket)

        param.register_post_accumulate_grad_hook(accumulated)
