"""ZeRO-1: every data-parallel rank updates its shard of the parameters (Rajbhandari et al. 2020).

A step: backward fills the gradient buffers. When a chunk's last backward begins (`expect_grads`),
each bucket is summed over the data-parallel ranks as soon as its last gradient has been added,
beside the rest of backward, and leaves each rank its shard; `finish_grads` waits. `local_norm_sq`
and one all-reduce elsewhere give the global norm; `step` clips and updates the shards in fp32 and
starts to bring the updated parameters together, in the order in which the next forward reads them;
`gather_params` waits for what a chunk reads first, and each layer for its own. World size 1 is the
same code with nothing to send. Dense parameters are sharded over the data- and context-parallel
ranks, experts over those that hold the same ones. What tensor-parallel ranks hold whole is summed
over these as well, as each has seen other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.collectives import all_gather, all_reduce, reduce_scatter
from app.config import OptimConfig
from app.model.weight_grads import MainGradSink, WeightGrad
from app.optim.adam import AdamShard, ParamShard
from app.optim.buffers import FlatBuffer, ParamSpec
from app.plan.sharding.parameters import ChunkBuffers

NORM_EPS = 1e-6  # keeps the clipping factor finite


@dataclass(frozen=True, slots=True)
class OptimizerGroups:
    """Who shares what an optimizer updates, by the names in `app.plan.groups`."""

    dp_cp: dist.ProcessGroup  # ranks that hold the same dense parameters
    edp: dist.ProcessGroup  # ranks that hold the same experts
    tp: dist.ProcessGroup  # tensor-parallel ranks
    embedding: dist.ProcessGroup  # the two ranks that hold copies of tied embeddings


@dataclass(slots=True)
class BucketRow:
    """The buckets of one buffer; their gradients are reduced in one order on all its ranks."""

    shards: Sequence[AdamShard]
    overlaps: bool
    missing: list[int] = field(default_factory=list)  # gradients per bucket; empty: not begun
    started: int = 0  # buckets whose reduction has begun
    works: list[dist.Work] = field(default_factory=list)
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # that have added gradients
    # takes arrivals while a graph is recorded; None: they count at once
    noted: list[tuple[BucketRow, int]] | None = None

    def begin(self) -> None:
        """The step's last backward follows: each arrival now completes a parameter's gradient."""
        if self.overlaps:
            self.missing = [shard.params_inside for shard in self.shards]

    def arrived(self, bucket: int) -> None:
        """Count a complete gradient; a bucket's last one starts its reduction, bucket by bucket."""
        if self.noted is not None:
            self.noted.append((self, bucket))
        elif self.missing:
            self.missing[bucket] -= 1
            if self.shards[bucket].grads.is_cuda:
                self.streams.add(torch.cuda.current_stream())
            while self.started < len(self.shards) and self.missing[self.started] <= 0:
                self._start()

    def start_all(self) -> None:
        """Start to reduce all buckets that are left, in order."""
        while self.started < len(self.shards):
            self._start()

    def finish(self) -> None:
        """Start the reductions that are left, and wait for all of them."""
        self.start_all()
        for work in self.works:
            work.wait()
        self.works = []
        self.missing = []
        self.started = 0
        self.streams.clear()

    def _start(self) -> None:
        shard = self.shards[self.started]
        self.started += 1
        for stream in self.streams:  # autograd adds a gradient on the stream of the forward
            torch.cuda.current_stream().wait_stream(stream)
        work = reduce_scatter(shard.grad, shard.grads, shard.group, wait=not self.overlaps)
        self.works += [] if work is None else [work]


Arrival = tuple[BucketRow, int]  # a gradient of one of its buckets


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


class DistributedOptimizer:
    """Sharded AdamW over the parameters of this rank's chunks.

    `chunks[c]` lists the parameters of chunk c in the order of use, and `buffers[c]` says where
    they lie; `grads` is the type in which gradients are summed. A chunk, or all of them, may have
    none: what is summed over ranks is then zero, on `device`.
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
    ) -> None:
        self.config = config
        self.groups = groups
        self.device = device
        self.rows = [list(self._rows(*both, grads)) for both in zip(chunks, buffers, strict=True)]
        self.shards = [[shard for row in rows for shard in row.shards] for rows in self.rows]
        self._in_use_order = [
            shard for both in zip(chunks, self.shards, strict=True) for shard in in_use_order(*both)
        ]
        self._grads = {
            spec.param: (row, bucket, grad)
            for row in self._all_rows()
            for bucket, spec, grad in _places(row)
        }
        # parameters that are not whole; None: not on their way yet
        self._arriving: dict[AdamShard, dist.Work | None] = {}

    def _rows(
        self, specs: Sequence[ParamSpec], buffers: ChunkBuffers, grads: torch.dtype
    ) -> Iterator[BucketRow]:
        for expert, layout, group in (
            (False, buffers.dense, self.groups.dp_cp),
            (True, buffers.expert, self.groups.edp),
        ):
            if layout is not None:
                inside = [spec for spec in specs if spec.expert == expert]
                buffer = FlatBuffer(inside, layout, grads)
                shards = [AdamShard(buffer, bucket, group) for bucket in range(len(layout.buckets))]
                row = BucketRow(shards, self.config.overlap_grads)
                buffer.arrived = row.arrived
                yield row

    def zero_grad(self) -> None:
        """Clear the gradient sums before the first backward of a step."""
        for row in self._all_rows():
            row.shards[0].buffer.grads.zero_()

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add to the gradient sum of a parameter what its backward has left for later."""
        gradient.add_to(self._grads[param][2])

    def main_grad_sink(self) -> MainGradSink | None:
        """Takes gradients of weights into wider sums; None: same type, autograd adds in place."""
        first = next(self._all(), None)
        if first is None or first.grads.dtype == first.params.dtype:
            return None
        return MainGradSink(self._add_now)

    def _add_now(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        row, bucket, total = self._grads[param]
        gradient.add_to(total)
        row.arrived(bucket)

    def expect_grads(self, chunk: int, last: bool) -> None:
        """A backward of a chunk follows; `last`: no gradient of the step comes after it."""
        for row in self.rows[chunk] if last else ():
            row.begin()

    @contextmanager
    def noting_arrivals(self) -> Iterator[list[Arrival]]:
        """Within the block arriving gradients are listed, not counted: a graph is recorded or run,
        and `tell_arrivals` counts them once their values are there.
        """
        noted: list[Arrival] = []
        for row in self._all_rows():
            row.noted = noted
        try:
            yield noted
        finally:
            for row in self._all_rows():
                row.noted = None

    def tell_arrivals(self, noted: Sequence[Arrival]) -> None:
        """Count the gradients listed by `noting_arrivals`, after a replay."""
        for row, bucket in noted:
            row.arrived(bucket)

    def reduce_grads(self, chunk: int) -> None:
        """Start to sum what is left of a chunk's gradients over dp; each rank keeps its shard."""
        for row in self.rows[chunk]:
            row.start_all()

    def finish_grads(self) -> None:
        """Wait until all gradients have been summed, then add up those of copies.

        What two stages or all tensor-parallel ranks hold is summed last, by shards: a sum over
        other ranks behind it could differ in its order, and copies in their bits.
        """
        for row in self._all_rows():
            row.finish()
        self._sum_tied()
        shared = [owned.grad for owned in self.param_shards() if owned.spec.shared]
        if self.groups.tp.size() > 1 and shared:
            sum_over(self.groups.tp, shared)

    def _sum_tied(self) -> None:
        """Add up the two gradients of a tied parameter: a + b has the same bits on both sides."""
        match [shard.grad for shard in self._all() if shard.tied]:
            case [one]:
                all_reduce(one, self.groups.embedding)
            case [first, second]:  # both on this rank
                second.copy_(first.add_(second))

    def local_norm_sq(self) -> Tensor:
        """fp32 scalar: this rank's share of the squared norm; a sum over all ranks makes it."""
        grads = [grad for shard in self._all() for grad in shard.counted_grads()]
        if not grads:  # of an empty stage, or where another tensor-parallel rank's count
            return torch.zeros((), device=self.device)
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads]
        return torch.stack(norms).square().sum()

    def local_zeros(self) -> Tensor:
        """fp32 scalar: this rank's share of the gradient's zero elements; all ranks sum it."""
        counts = [(owned.grad == 0).sum() for owned in self.param_shards() if owned.spec.counted]
        return torch.stack(counts).sum().float() if counts else torch.zeros((), device=self.device)

    def step(
        self, lr: float, weight_decay: float, norm: Tensor, scale: Tensor | None = None
    ) -> Tensor:
        """Clip to `clip_norm` given the global gradient norm and update; returns 1.0 where the
        update was skipped.

        `scale`: what gradients, and `norm`, have been multiplied with. A norm that is not finite
        skips the update: parameters, moments and step counts stay as they are.
        """
        skip = (~norm.isfinite()).float()
        limit = self.config.clip_norm
        true_norm = norm if scale is None else norm / scale
        if limit:
            divisor = ((true_norm + NORM_EPS) / limit).clamp(min=1.0)
        else:
            divisor = torch.ones_like(norm)
        if scale is not None:
            divisor = divisor * scale
        for shard in self._in_use_order:
            shard.update(self.config, lr, weight_decay, grad_divisor=divisor, skip=skip)
            self._changed(shard)
        return skip

    def gather_params(self, chunk: int) -> None:
        """Make all parameters of a chunk whole on every rank, where they are not yet."""
        for shard in self.shards[chunk]:
            self._arrive(shard)

    def start_gather(self, chunk: int) -> None:
        """Before a chunk's first forward: the same, unless its parameters are on their way and
        `gate`s wait for them.
        """
        if not self.config.overlap_params:
            self.gather_params(chunk)

    def gate(self, params: Iterable[nn.Parameter]) -> Callable[[], None]:
        """A function that waits until these parameters have been gathered."""
        rows = (self._grads[param] for param in params)
        shards = list(dict.fromkeys(row.shards[bucket] for row, bucket, _ in rows))

        def wait() -> None:
            for shard in shards if self._arriving else ():
                self._arrive(shard)

        return wait

    def param_shards(self) -> Iterator[ParamShard]:
        """Every part of a parameter that this rank owns, with its optimizer state."""
        for shard in self._all():
            yield from shard.param_shards

    def restored(self, updates: int) -> None:
        """Say that the pieces were filled from a checkpoint taken after `updates` updates."""
        for owned in self.param_shards():
            owned.step.fill_(updates)
        for shard in self._in_use_order:
            if shard.main is not shard.own_params:
                shard.own_params.copy_(shard.main)
            self._changed(shard)

    def _changed(self, shard: AdamShard) -> None:
        """All ranks' shards have changed: gather them now, or note that this must be done."""
        work = None
        if self.config.overlap_params:
            work = all_gather(shard.params, shard.own_params, shard.group, wait=False)
        self._arriving[shard] = work

    def _arrive(self, shard: AdamShard) -> None:
        if shard not in self._arriving:
            return
        work = self._arriving.pop(shard)
        if work is not None:
            work.wait()
        elif not self.config.overlap_params:
            all_gather(shard.params, shard.own_params, shard.group)

    def _all_rows(self) -> Iterator[BucketRow]:
        for rows in self.rows:
            yield from rows

    def _all(self) -> Iterator[AdamShard]:
        for shards in self.shards:
            yield from shards


def _places(row: BucketRow) -> Iterator[tuple[int, ParamSpec, Tensor]]:
    for shard in row.shards:
        for spec, grad in shard.buffer.of_bucket(shard.bucket):
            yield shard.bucket, spec, grad
