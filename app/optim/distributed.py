"""ZeRO-1: every data-parallel rank updates its shard of the parameters (Rajbhandari et al. 2020).

A step: backward fills the gradient buffers. When a chunk's last backward begins (`expect_grads`),
each bucket is reduce-scattered over the data-parallel ranks as soon as its last gradient has been
added, beside the rest of backward; `finish_grads` waits (`app.optim.grad_buckets`). `local_norm_sq`
and one all-reduce elsewhere give the global norm; `step` clips and updates the shards in fp32. The
updated parameters are all-gathered in the order in which forward reads them, from the update on, or
from the beginning of the next step where that is recorded as one graph (`begin`); `gather_params`
waits for a chunk's, or each layer for its own (`app.optim.param_gather`). World size 1 is the same
code with nothing to send. Dense parameters are sharded over the data- and context-parallel ranks,
experts over those that hold the same ones. What tensor-parallel ranks hold whole is summed over
these as well, as each has seen other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.collectives import all_reduce
from app.config import OptimConfig
from app.model.weight_grads import MainGradSink, WeightGrad
from app.optim.adam import AdamShard, ParamShard
from app.optim.buffers import FlatBuffer, ParamSpec
from app.optim.grad_buckets import Arrival, GradBuckets
from app.optim.param_gather import ParamGather
from app.plan.sharding.parameters import ChunkBuffers

NORM_EPS = 1e-6  # keeps the clipping factor finite


@dataclass(frozen=True, slots=True)
class OptimizerGroups:
    """Who shares what an optimizer updates, by the names in `app.plan.groups`."""

    dp_cp: dist.ProcessGroup  # ranks that hold the same dense parameters
    edp: dist.ProcessGroup  # ranks that hold the same experts
    tp: dist.ProcessGroup  # tensor-parallel ranks
    embedding: dist.ProcessGroup  # the two ranks that hold copies of tied embeddings


def sum_over(group: dist.ProcessGroup, grads: Sequence[Tensor]) -> None:
    """All-reduce small gradients over a group in one buffer, in place."""
    total = torch.cat([grad.flatten() for grad in grads])
    all_reduce(total, group)
    for grad, part in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def in_use_order(specs: Sequence[ParamSpec], shards: Sequence[AdamShard]) -> list[AdamShard]:
    """A chunk's shards, dense and expert, in the order in which forward first reads them."""
    place = {spec.name: number for number, spec in enumerate(specs)}
    return sorted(
        shards,
        key=lambda shard: min(place[spec.name] for spec, _ in shard.buffer.of_bucket(shard.bucket)),
    )


def grad_divisor(norm: Tensor, clip_norm: float, scale: Tensor | None) -> Tensor:
    """fp32 scalar by which an update divides gradients, given their global norm.

    It takes out the loss `scale`, and clips to `clip_norm` the norm without it; 0: no clipping.
    """
    true_norm = norm if scale is None else norm / scale
    if clip_norm:
        divisor = ((true_norm + NORM_EPS) / clip_norm).clamp(min=1.0)
    else:
        divisor = torch.ones_like(norm)
    return divisor if scale is None else divisor * scale


class DistributedOptimizer:
    """Sharded AdamW over the parameters of this rank's chunks.

    `chunks[c]` lists the parameters of chunk c in the order of use, and `buffers[c]` says where
    they lie; `grads` is the type in which gradients are summed. A chunk, or all of them, may have
    none: what is summed over ranks is then zero, on `device`. With `full_iteration`, a step is one
    graph, and gathers updated parameters itself (`in_graph`). `writes_first`: the sums of experts
    are not cleared, their first gradients in a step are written.
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
        self._buckets_of = {
            spec.param: buckets
            for buckets in self._all_grad_buckets()
            for spec in buckets.buffer.specs
        }
        self.shards = [  # per chunk: those of all its buckets
            [shard for buckets in of_chunk for shard in adam_shards(buckets)]
            for of_chunk in self.grad_buckets
        ]
        self._in_use_order = [
            shard
            for specs, shards in zip(chunks, self.shards, strict=True)
            for shard in in_use_order(specs, shards)
        ]
        at_update = config.overlap_params and not full_iteration
        self._param_gather = ParamGather(self._in_use_order, at_update)
        # replaced where something is made of parameters that holds until they change; called when
        # they have, or will have in what is recorded now and replayed later
        self.changed: Callable[[], None] = nothing
        if full_iteration:  # the first eager step connects what recorded gathers will go through
            for shard in self._in_use_order:
                self._param_gather.updated(shard)

    def _grad_buckets(
        self, specs: Sequence[ParamSpec], layouts: ChunkBuffers, grads: torch.dtype
    ) -> Iterator[GradBuckets]:
        """Put a chunk's parameters into their buffers, dense ones and experts."""
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
                    pairs=self.config.pair_expert_grads,
                    writes_first=expert and self.writes_first,
                )

    def zero_grad(self) -> None:
        """Forget the gradient sums before the first backward of a step."""
        for buckets in self._all_grad_buckets():
            buckets.zero()

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add to the gradient sum of a parameter what autograd does not."""
        self._buckets_of[param].add(param, gradient)

    def main_grad_sink(self) -> MainGradSink | None:
        """What adds gradients of weights to sums of more bits; None: the sums have the weights'
        type, and autograd adds in place.
        """
        first = next(self._all_grad_buckets(), None)
        if first is None or first.buffer.autograd_adds:
            return None
        return MainGradSink(self.add_grad)

    def expect_grads(self, chunk: int, last: bool) -> None:
        """A backward of a chunk follows; the `last` one of a step completes sums of gradients."""
        if last:
            for buckets in self.grad_buckets[chunk]:
                buckets.expect_last()

    @contextmanager
    def listing_arrivals(self) -> Iterator[list[Arrival]]:
        """Within the block arriving gradients are listed, not counted: a graph is recorded or run,
        and `count_listed` counts them once their values are there.
        """
        listed: list[Arrival] = []
        for buckets in self._all_grad_buckets():
            buckets.list_arrivals(listed)
        try:
            yield listed
        finally:
            for buckets in self._all_grad_buckets():
                buckets.stop_listing()

    def count_listed(self, arrivals: Sequence[Arrival]) -> None:
        """Count the gradients listed by `listing_arrivals`, after a replay."""
        for buckets, bucket in arrivals:
            buckets.arrive(bucket)

    def reduce_grads(self, chunk: int) -> None:
        """Start to sum what is left of a chunk's gradients: dense ones over dp_cp, those of experts
        over edp. Each rank keeps its shard.
        """
        for buckets in self.grad_buckets[chunk]:
            buckets.reduce()

    def finish_grads(self) -> None:
        """Wait until all gradients have been summed, then add up those of copies.

        What two stages or all tensor-parallel ranks hold is summed last, by shards: a sum over
        other ranks behind it could differ in its order, and copies in their bits.
        """
        for buckets in self._all_grad_buckets():
            buckets.finish()
        self._sum_tied()
        shared = [owned.grad for owned in self.param_shards() if owned.spec.replica]
        if self.groups.tp.size() > 1 and shared:
            sum_over(self.groups.tp, shared)

    def _sum_tied(self) -> None:
        """Add up the two gradients of a tied parameter: a + b has the same bits on both sides."""
        match [shard.grad for shard in self._all_shards() if shard.tied]:
            case [one]:
                all_reduce(one, self.groups.embedding)
            case [first, second]:  # both on this rank
                second.copy_(first.add_(second))

    def local_norm_sq(self) -> Tensor:
        """fp32 scalar: this rank's share of the squared norm; a sum over all ranks makes it."""
        grads = [grad for shard in self._all_shards() for grad in shard.counted_grads()]
        if not grads:  # of an empty stage, or where another tensor-parallel rank's count
            return torch.zeros((), device=self.device)
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        return torch.stack(norms).square().sum()

    def local_zeros(self) -> Tensor:
        """fp32 scalar: this rank's share of the gradient's zero elements; all ranks sum it."""
        counts = [(owned.grad == 0).sum() for owned in self.param_shards() if owned.spec.counted]
        return torch.stack(counts).sum().float() if counts else torch.zeros((), device=self.device)

    def step(self, rates_2: Tensor, norm: Tensor, scale: Tensor | None = None) -> Tensor:
        """Clip to `clip_norm` and update this rank's shards; returns 1.0 where the update was
        skipped, otherwise 0.0 (fp32 scalar).

        `rates_2`: learning rate and weight decay (`app.kernels.adamw.update_rates`). `norm`: of the
        whole gradient, over all ranks. `scale`: what gradients, and `norm`, have been multiplied
        with. A norm that is not finite skips the update: parameters, moments and step counts stay
        as they are.
        """
        skip = (~norm.isfinite()).float()
        divisor = grad_divisor(norm, self.config.clip_norm, scale)
        for shard in self._in_use_order:
            self._param_gather.settle(shard)
            shard.update(self.config, rates_2, divisor, skip=skip)
            self._param_gather.updated(shard)
        self.changed()
        return skip

    def gather_params(self, chunk: int) -> None:
        """Make all parameters of a chunk whole on every rank, where they are not yet."""
        for shard in self.shards[chunk]:
            self._param_gather.make_whole(shard)

    def begin(self) -> None:
        """Work on all chunks begins: with `overlap_params`, bring the parameters on their way that
        are neither whole nor on it, in the order of use.
        """
        if self.config.overlap_params:
            for shard in self._in_use_order:
                self._param_gather.start(shard)

    def in_graph(self, updates: bool = False) -> AbstractContextManager[None]:
        """Within the block such work is recorded or replayed. It makes all parameters whole, and
        `updates` them behind that or not.
        """
        self.changed()
        return self._param_gather.in_graph(updates)

    def start_gather(self, chunk: int) -> None:
        """Before a chunk's first forward: make its parameters whole, unless they are on their way
        and `gate`s wait for them.
        """
        if not self.config.overlap_params:
            self.gather_params(chunk)

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[[], None]:
        """A function that waits until these parameters have been gathered."""
        return self._param_gather.gate(params)

    def param_shards(self) -> Iterator[ParamShard]:
        """Every part of a parameter that this rank owns, with its optimizer state."""
        for shard in self._all_shards():
            yield from shard.param_shards

    def restored(self, updates: int) -> None:
        """The parts in `param_shards` were filled from a checkpoint taken after `updates`
        updates: make the parameters those of the checkpoint on all ranks.
        """
        for owned in self.param_shards():
            owned.step.fill_(updates)
        for shard in self._in_use_order:
            if shard.main is not shard.own_params:
                shard.own_params.copy_(shard.main)
            self._param_gather.updated(shard)
        self.changed()

    def _all_grad_buckets(self) -> Iterator[GradBuckets]:
        return chain.from_iterable(self.grad_buckets)

    def _all_shards(self) -> Iterator[AdamShard]:
        return chain.from_iterable(self.shards)


def nothing() -> None:
    """Return at once: nobody asks."""


def adam_shards(buckets: GradBuckets) -> Iterator[AdamShard]:
    """This rank's shards of a buffer's buckets."""
    for bucket in range(buckets.num_buckets):
        yield AdamShard(buckets.buffer, bucket, buckets.group)
