"""Gradients of one flat buffer on one rank: counted as they arrive, summed over ranks by buckets.

As in PyTorch's DistributedDataParallel (Li et al. 2020) a bucket is sent when its last gradient has
arrived, beside the rest of backward, and always behind the bucket before it, so that all ranks send
in one order. Here each is a reduce-scatter, which leaves every rank its shard of the sum (ZeRO).
"""

from __future__ import annotations

import weakref
from collections import Counter
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.collectives import reduce_scatter
from app.model.weight_grads import GroupedLinearGrad, PairedGrad, WeightGrad
from app.optim.buffers import FlatBuffer


class GradState(Enum):
    """Where the gradients of a buffer stand within a step."""

    accumulating = "accumulating"  # gradients of microbatches are added up
    expecting = "expecting"  # the step's last backward: what arrives now is a parameter's last
    reducing = "reducing"  # the reduce-scatters of all buckets have begun
    reduced = "reduced"  # this rank's shards hold sums over all ranks


class Arrival(NamedTuple):
    """A gradient that has been added to the sum of a parameter in a bucket."""

    buckets: GradBuckets
    bucket: int


class GradBuckets:
    """The buckets of a flat buffer, which gradients each still misses, and their reduce-scatters.

    A gradient arrives, once for each parameter and microbatch (of a table that is looked up and is
    the head, twice where backward is split), by one of three routes, and all end in `arrive`:
    autograd has accumulated it (a hook on every parameter); a weight-gradient sink hands it over
    during backward, or a deferred `BackwardWeight` after it (`add`); or a graph has been replayed
    whose arrivals had been listed (`list_arrivals`) when it was recorded.

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

    [1] With `overlaps`; without, it stays accumulating, and a reduce-scatter is waited for at once.
    Of a split backward nothing is expected (`last_backwards`): it too is reduced at its end.
    [2] Buckets that miss none start in order; behind the last one it is reducing. A gradient more
    than a bucket has parameters is a bug.

    With `pairs`, the gradient of an experts' weight in every other microbatch waits, and arrives
    with the next one's as one product; the last of an odd number arrives by itself where it is
    expected, and else is added when sums are reduced.

    With `writes_first`, sums are not cleared: the first gradient of a step is written instead of
    added, and what none has come for is cleared before it is reduced. That cannot be where one
    recording serves the first microbatch and others. There the next replay also overwrites where
    experts' rows end, so that a gradient that waits keeps a copy.

    A bug is an AssertionError. While arrivals are listed, `arrive` lists in every state.
    """

    def __init__(
        self,
        buffer: FlatBuffer,
        group: dist.ProcessGroup,
        overlaps: bool,
        *,
        pairs: bool = False,
        writes_first: bool = False,
    ) -> None:
        self.buffer = buffer
        self.group = group
        self.overlaps = overlaps  # reduce-scatters run beside the rest of backward
        self.pairs = pairs  # gradients of experts of two microbatches are added as one product
        self.writes_first = writes_first
        self._unwritten: set[nn.Parameter] = set()  # whose sums hold those of the step before
        self._held: dict[nn.Parameter, GroupedLinearGrad] = {}  # of the first of two
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
        self._sums: dict[nn.Parameter, tuple[int, Tensor]] = {}  # bucket, and sum of gradients
        for (spec, total), bucket in zip(buffer.grad_views(), layout.bucket_of, strict=True):
            self._sums[spec.param] = bucket, total
            self._hook(spec.param, bucket, total)

    def zero(self) -> None:
        """Before the first backward of a step, clear the sums, or with `writes_first` forget what
        they hold until it is overwritten.
        """
        assert self.state in (GradState.accumulating, GradState.reduced), "a step is not over"
        assert not self._held, "the sums were reduced without what has been held back"
        if self.writes_first:
            self._unwritten.update(self._sums)
        else:
            self.buffer.grads.zero_()
        self.state = GradState.accumulating

    def expect_last(self) -> None:
        """The step's last backward follows: each gradient completes its parameter's sum."""
        assert self.state is GradState.accumulating, f"a backward after the last: {self.state}"
        if self.overlaps:
            self._missing = self._params_in.copy()
            self.state = GradState.expecting

    def add(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add a gradient that does not come from autograd to its parameter's sum, or hold it back
        until that of the next microbatch is there too.
        """
        if self.pairs and isinstance(gradient, GroupedLinearGrad):
            earlier = self._held.pop(param, None)
            if earlier is not None:
                gradient = PairedGrad(earlier, gradient)
            elif self.state is GradState.accumulating:
                self._held[param] = gradient if self.writes_first else gradient.with_own_ends()
                return
        bucket, total = self._sums[param]
        if param in self._unwritten:
            self._unwritten.remove(param)
            gradient.write_to(total)
        else:
            gradient.add_to(total)
        self.arrive(bucket)

    def arrive(self, bucket: int) -> None:
        """A gradient has been added to the sum of one of the bucket's parameters."""
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
        """From here on append arrivals to `into`: a graph is being recorded, or replayed."""
        self._listing = True
        self._listed = into

    def stop_listing(self) -> None:
        """From here on arrivals count again."""
        self._listing = False
        self._listed = []

    def reduce(self) -> None:
        """Start the reduce-scatters that have not begun."""
        assert self.state is not GradState.reduced, "the sums are those over all ranks already"
        self._add_held()
        while self._started < self.num_buckets:
            self._start_next()

    @torch.no_grad()
    def _add_held(self) -> None:
        """Of an odd number of microbatches the last gradients have met no others."""
        assert not self._held or self._started == 0, "these sums are on their way already"
        for param, gradient in self._held.items():
            assert param not in self._unwritten, (
                "a step has two microbatches or more, and the first two are one"
            )
            gradient.add_to(self._sums[param][1])
        self._held.clear()

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
        """Start the buckets that have become complete, in order."""
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
        """Sums that no gradient of this step has come for."""
        for param in [*self._unwritten]:
            of, total = self._sums[param]
            if of == bucket:
                total.zero_()
                self._unwritten.remove(param)

    def _hook(self, param: nn.Parameter, bucket: int, total: Tensor) -> None:
        """Count each gradient that autograd has accumulated for the parameter; where the sum has
        another type, first add it to the sum.

        torch calls the hook also for a weight whose gradient a sink has taken. Where the sum has
        another type, `param.grad` is None then, and nothing arrives. Where autograd adds to the sum
        itself, `param.grad` is the sum in any case, and the call would count as one arrival too
        many. It never does: where autograd adds, only a split backward has a sink
        (`main_grad_sink`), and of that no arrivals are expected (`last_backwards`).
        """
        # weak: torch keeps hooks where the garbage collector does not see a cycle
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
            assert buckets is not None, "lives as long as its parameters are trained"
            buckets.arrive(bucket)

        param.register_post_accumulate_grad_hook(accumulated)
