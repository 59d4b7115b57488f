"""Distributed optimizer (ZeRO-1): every data-parallel rank updates its shard of the parameters
(Rajbhandari et al. 2020).

A step:
1. Backward accumulates into the gradient buffers.
2. When a chunk's last backward begins (`expect_grads`), each bucket is reduce-scattered over the
   data-parallel ranks as soon as its last gradient has been added, overlapping the rest of
   backward; `finish_grads` waits (`app.optim.grad_buckets`).
3. `local_norm_sq` and one all-reduce elsewhere give the global norm.
4. `step` clips and updates the shards in fp32.
5. The updated parameters are all-gathered in the order in which forward reads them, after the
   update, or at the start of the next step if that is captured as one graph (`begin`);
   `gather_params` waits for a chunk's, or each layer for its own (`app.optim.param_gather`).

World size 1 runs the same code without communication. Dense parameters are sharded over data- and
context-parallel ranks, experts over the ranks that hold the same ones. Gradients of parameters that
tensor-parallel ranks replicate are summed over these as well, as each has seen other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.collectives import all_reduce
from app.config import OptimConfig
from app.model.layers.weight_grads import MainGradSink, WeightGrad
from app.optim.buffers import FlatBuffer, ParamSpec
from app.optim.grad_buckets import Arrival, GradBuckets
from app.optim.optimizers import shards_of, updates_of
from app.optim.param_gather import ParamGather
from app.optim.shard import OptimizerGroups, ParamShard, Shard
from app.plan.sharding.parameters import ChunkBuffers

NORM_EPS = 1e-6  # keeps the clipping factor finite


def sum_over(group: dist.ProcessGroup, grads: Sequence[Tensor]) -> None:
    """All-reduce small gradients over a group in one buffer, in place."""
    total = torch.cat([grad.flatten() for grad in grads])
    all_reduce(total, group)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def in_use_order(specs: Sequence[ParamSpec], shards: Sequence[Shard]) -> list[Shard]:
    """Return a chunk's shards, dense and expert, in the order in which forward first reads them."""
    place = {spec.name: number for number, spec in enumerate(specs)}
    return sorted(
        shards,
        key=lambda shard: min(place[spec.name] for spec, _ in shard.buffer.of_bucket(shard.bucket)),
    )


def grad_divisor(norm: Tensor, clip_norm: float, scale: Tensor | None) -> Tensor:
    """Return the fp32 scalar by which an update divides gradients, given their global norm.

    Undoes the loss `scale`, and clips the unscaled norm to `clip_norm`; 0 disables clipping.
    """
    true_norm = norm if scale is None else norm / scale
    if clip_norm:
        divisor = ((true_norm + NORM_EPS) / clip_norm).clamp(min=1.0)
    else:
        divisor = torch.ones_like(norm)
    return divisor if scale is None else divisor * scale


class DistributedOptimizer:
    """Sharded optimizer over the parameters of this rank's chunks.

    `chunks[c]` lists the parameters of chunk c in the order of use, and `buffers[c]` gives their
    layout; `grads` is the dtype of main gradients. Chunks may have no parameters: sums over ranks
    are then zero, on `device`. With `full_iteration`, a step is one graph, and gathers updated
    parameters itself (`in_graph`). `writes_first`: main gradients of experts are not cleared; the
    first gradient of a step overwrites them.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[ParamSpec]],
        buffers: Sequence[ChunkBuffers],
        config: OptimConfig,
        groups: OptimizerGroups,
        grads: torch.dtype = torch.float32,
        *,
        device: torch.device,
        full_iteration: bool = False,
        writes_first: bool = False,
    ) -> None:
        self.config = config
        self.writes_first = writes_first
        self.groups = groups
        self.device = device
        self.grad_buckets = [  # per chunk: of its dense parameters and of its experts
            list(self._grad_buckets(specs, layouts, grads))
            for specs, layouts in zip(chunks, buffers, strict=True)
        ]
        self._buckets_of: dict[nn.Parameter, GradBuckets | NoGrads] = {
            spec.param: buckets
            for buckets in self.all_grad_buckets()
            for spec in buckets.buffer.specs
        }
        self.shards = [  # per chunk: those of all its buckets
            [shard for buckets in of_chunk for shard in shards_of(buckets, config)]
            for of_chunk in self.grad_buckets
        ]
        self._in_use_order = [
            shard
            for specs, shards in zip(chunks, self.shards, strict=True)
            for shard in in_use_order(specs, shards)
        ]
        updates = updates_of(self._in_use_order, config, groups)
        self._updates = [(update, tuple(update.shards)) for update in updates]
        at_update = config.overlap_params and not full_iteration
        self._param_gather = ParamGather(self._in_use_order, at_update)
        # callback when parameters have changed, or will have when captured work is replayed;
        # replaced by users that cache something derived from parameters
        self.changed: Callable[[], None] = nothing
        # callback before shards change; replaced by users that copy them beside training
        self.changing: Callable[[], None] = nothing
        if full_iteration:  # capture needs NCCL connections: the first eager step makes them
            for shard in self._in_use_order:
                self._param_gather.updated(shard)

    def _grad_buckets(
        self, specs: Sequence[ParamSpec], layouts: ChunkBuffers, grads: torch.dtype
    ) -> Iterator[GradBuckets]:
        """Move a chunk's parameters into their buffers, dense ones and experts."""
        for expert, layout, group in (
            (False, layouts.dense, self.groups.dp_cp),
            (True, layouts.expert, self.groups.edp),
        ):
            if layout is not None:
                inside = [spec for spec in specs if spec.expert == expert]
                buffer = FlatBuffer(inside, layout, grads)
                yield GradBuckets(
                    buffer,
                    group,
                    self.config.overlap_grads,
                    writes_first=expert and self.writes_first,
                )

    def zero_grad(self) -> None:
        """Clear the main gradients before the first backward of a step."""
        for buckets in self.all_grad_buckets():
            buckets.zero()

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add a gradient that autograd does not accumulate to a parameter's main gradient."""
        self._buckets_of[param].add(param, gradient)

    def leave_out(self, params: Iterable[nn.Parameter]) -> None:
        """Drop gradients of these parameters, which are not trained, without computing them."""
        self._buckets_of.update(dict.fromkeys(params, NoGrads()))

    def main_grad_sink(self) -> MainGradSink | None:
        """Return the sink that adds weight gradients to wider main gradients; None if these have
        the weights' dtype, where autograd accumulates in place.
        """
        first = next(self.all_grad_buckets(), None)
        if first is None or first.buffer.autograd_adds:
            return None
        return MainGradSink(self.add_grad)

    def expect_grads(self, chunk: int, last: bool) -> None:
        """Announce a backward of a chunk; the `last` one of a step completes its main gradients."""
        if last:
            for buckets in self.grad_buckets[chunk]:
                buckets.expect_last()

    @contextmanager
    def listing_arrivals(self) -> Iterator[list[Arrival]]:
        """List arriving gradients within the block instead of counting them, while a graph is
        captured or run; `count_listed` counts them once their values are there.
        """
        listed: list[Arrival] = []
        for buckets in self.all_grad_buckets():
            buckets.list_arrivals(listed)
        try:
            yield listed
        finally:
            for buckets in self.all_grad_buckets():
                buckets.stop_listing()

    def count_listed(self, arrivals: Sequence[Arrival]) -> None:
        """Count the gradients listed by `listing_arrivals`, after a replay."""
        for buckets, bucket in arrivals:
            buckets.arrive(bucket)

    def reduce_grads(self, chunk: int) -> None:
        """Start the remaining reduce-scatters of a chunk's gradients: dense ones over dp_cp,
        experts over edp.
        """
        for buckets in self.grad_buckets[chunk]:
            buckets.reduce()

    def finish_grads(self) -> None:
        """Wait for all reduce-scatters, then sum the gradients of replicated parameters.

        Parameters replicated on two stages or on all tensor-parallel ranks are summed last, shard
        by shard. Every copy then uses one order and keeps equal bits.
        """
        for buckets in self.all_grad_buckets():
            buckets.finish()
        self._sum_tied()
        shared = [owned for owned in self.param_shards() if owned.spec.replicated]
        for expert, group in ((False, self.groups.tp), (True, self.groups.etp_shared)):
            grads = [owned.grad for owned in shared if owned.spec.expert == expert]
            if grads and group is not None and group.size() > 1:
                sum_over(group, grads)

    def _sum_tied(self) -> None:
        """Sum the two gradients of a tied parameter: a + b has the same bits on both sides."""
        match [shard.grad for shard in self.all_shards() if shard.tied]:
            case [one]:
                all_reduce(one, self.groups.embedding)
            case [first, second]:  # both on this rank
                second.copy_(first.add_(second))

    def local_norm_sq(self) -> Tensor:
        """Return this rank's share of the squared norm, an fp32 scalar; the sum over all ranks is
        the norm's.
        """
        grads = [grad for shard in self.all_shards() for grad in shard.counted_grads()]
        if not grads:  # of an empty stage, or where another tensor-parallel rank's count
            return torch.zeros((), device=self.device)
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        return torch.stack(norms).square().sum()

    def step(self, rates_2: Tensor, norm: Tensor, scale: Tensor | None = None) -> Tensor:
        """Clip to `clip_norm` and update this rank's shards; return 1.0 if the update was skipped,
        otherwise 0.0 (fp32 scalar).

        `rates_2`: learning rate and weight decay (`app.kernels.adamw.update_rates`). `norm`: of the
        whole gradient, over all ranks. `scale`: the loss scale contained in gradients and `norm`. A
        norm that is not finite skips the update: parameters, moments and step counts are unchanged.
        """
        self.changing()
        skip = (~norm.isfinite()).float()
        divisor = grad_divisor(norm, self.config.clip_norm, scale)
        for update, shards in self._updates:
            for shard in shards:
                self._param_gather.wait(shard)
            update.update(self.config, rates_2, divisor, skip=skip)
            for shard in shards:
                self._param_gather.updated(shard)
        self.changed()
        return skip

    def gather_params(self, chunk: int) -> None:
        """All-gather the parameters of a chunk that are not complete yet."""
        for shard in self.shards[chunk]:
            self._param_gather.ensure_gathered(shard)

    def begin(self) -> None:
        """Start work on all chunks: with `overlap_params`, start the all-gathers that have not
        started, in the order of use.
        """
        if self.config.overlap_params:
            for shard in self._in_use_order:
                self._param_gather.start(shard)

    def in_graph(self, updates: bool = False) -> AbstractContextManager[None]:
        """Capture or replay work within the block. It gathers all parameters, and then `updates`
        them or not.
        """
        self.changed()
        return self._param_gather.in_graph(updates)

    def start_gather(self, chunk: int) -> None:
        """Gather a chunk's parameters before its first forward, unless their all-gathers have
        started and `gate`s wait for them.
        """
        if not self.config.overlap_params:
            self.gather_params(chunk)

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[..., None]:
        """Return a pre-hook that waits until these parameters have been gathered."""
        return self._param_gather.gate(params)

    def param_shards(self) -> Iterator[ParamShard]:
        """Yield every part of a parameter that this rank owns, with its optimizer state."""
        for shard in self.all_shards():
            yield from shard.param_shards

    def restored(self, updates: int) -> None:
        """Update all ranks' parameters after the parts in `param_shards` were filled from a
        checkpoint taken after `updates` updates.
        """
        for shard in self._in_use_order:
            shard.restored(updates)
            self._param_gather.updated(shard)
        self.changed()

    def all_grad_buckets(self) -> Iterator[GradBuckets]:
        """Yield the buckets of all chunks, of dense parameters and of experts."""
        return chain.from_iterable(self.grad_buckets)

    def all_shards(self) -> Iterator[Shard]:
        """Yield the shards of all chunks."""
        return chain.from_iterable(self.shards)


class NoGrads:
    """Gradients of parameters that are not trained."""

    def add(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Drop the gradient."""


def nothing() -> None:
    """No-op: nothing depends on the parameters, or reads shards."""
