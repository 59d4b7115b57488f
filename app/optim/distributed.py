"""ZeRO-1: every data-parallel rank updates its shard of the parameters (Rajbhandari et al. 2020).

A step: backward fills the gradient buffers; `reduce_grads` and `finish_grads` sum them over the data-parallel ranks and
leave each its shard; `local_norm_sq` and one all-reduce elsewhere give the global norm; `step` clips and updates the shard
in fp32; `gather_params` brings the updated shards together before the next use. World size 1 is the same code with nothing
to send. Dense parameters are sharded over the data-parallel ranks, experts over those that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from app.compat import all_gather, all_reduce, reduce_scatter
from app.config import OptimConfig
from app.optim.adam import AdamShard, Piece
from app.optim.buffers import FlatBuffer, ParamSpec
from app.plan.parameters import ChunkBuffers

NORM_EPS = 1e-6  # keeps the clipping factor finite


class DistributedOptimizer:
    """Sharded AdamW over the parameters of this rank's chunks.

    `chunks[c]` lists the parameters of chunk c in registration order, and `buffers[c]` says where they lie; `dp` and
    `edp` are the groups that hold the same dense and expert parameters, `embedding` the ranks that hold tied copies.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[ParamSpec]],
        buffers: Sequence[ChunkBuffers],
        config: OptimConfig,
        dp: dist.ProcessGroup,
        edp: dist.ProcessGroup,
        embedding: dist.ProcessGroup | None = None,
    ) -> None:
        self.config, self.embedding = config, embedding
        pairs = zip(chunks, buffers, strict=True)
        self.shards: list[list[AdamShard]] = [list(_shards(specs, layouts, dp, edp)) for specs, layouts in pairs]
        self._grads = {spec.param: grad for shard in self._all() for spec, grad in shard.buffer.grad_views()}
        self._stale = [False] * len(chunks)

    def zero_grad(self) -> None:
        """Clear the gradient sums before the first backward of a step."""
        for shard in self._all():
            shard.buffer.grads.zero_()

    def add_grad(self, param: nn.Parameter, grad: Tensor) -> None:
        """Add to the gradient sum of a parameter what its backward has left for later."""
        self._grads[param].add_(grad)

    def reduce_grads(self, chunk: int) -> None:
        """Sum a chunk's gradients over its data-parallel ranks; each keeps its shard.

        What shares a buffer with a tied parameter waits for `finish_grads`: the other stage's copy may still be computing.
        """
        for shard in self.shards[chunk]:
            if not shard.buffer.tied:
                reduce_scatter(shard.grad, shard.buffer.grads, shard.group)

    def finish_grads(self) -> None:
        """Add up the gradients of tied parameters over their copies, and reduce the buffers that hold them."""
        tied = [shard for shard in self._all() if shard.buffer.tied]
        copies = [grad for shard in tied for grad in shard.buffer.tied]
        if not copies:
            return
        total = torch.stack(copies).sum(0) if len(copies) > 1 else copies[0]
        if self.embedding is not None:  # None: all copies are on this rank
            all_reduce(total, self.embedding)
        for grad in copies:
            grad.copy_(total)
        for shard in tied:
            reduce_scatter(shard.grad, shard.buffer.grads, shard.group)

    def local_norm_sq(self) -> Tensor:
        """Squared norm of this rank's gradient shards; summed over all ranks it counts every parameter once. fp32 scalar."""
        norms = torch.stack([grad.norm() for shard in self._all() for grad in shard.counted_grads()])
        return norms.square().sum()

    def step(self, lr: float, weight_decay: float, norm: Tensor) -> Tensor:
        """Clip to `clip_norm` given the global gradient norm and update; returns 1.0 where the update was skipped.

        A norm that is not finite skips the update: parameters, moments and step counts stay as they are.
        """
        skip = (~norm.isfinite()).float()
        limit = self.config.clip_norm
        divisor = ((norm + NORM_EPS) / limit).clamp(min=1.0) if limit else torch.ones_like(norm)
        for shard in self._all():
            shard.update(self.config, lr, weight_decay, divisor, skip)
        self._stale = [True] * len(self._stale)
        return skip

    def gather_params(self, chunk: int) -> None:
        """Bring the updated shards of a chunk together on every rank; nothing to do when that has been done."""
        if self._stale[chunk]:
            for shard in self.shards[chunk]:
                all_gather(shard.buffer.params, shard.own_params, shard.group)
            self._stale[chunk] = False

    def pieces(self) -> Iterator[Piece]:
        """Every part of a parameter that this rank owns, with its optimizer state."""
        for shard in self._all():
            yield from shard.pieces

    def restored(self, updates: int) -> None:
        """Say that the pieces were filled from a checkpoint taken after `updates` updates."""
        for piece in self.pieces():
            piece.step.fill_(updates)
        for shard in self._all():
            if shard.main is not shard.own_params:
                shard.own_params.copy_(shard.main)
        self._stale = [True] * len(self._stale)

    def _all(self) -> Iterator[AdamShard]:
        for shards in self.shards:
            yield from shards


def _shards(
    specs: Sequence[ParamSpec], buffers: ChunkBuffers, dp: dist.ProcessGroup, edp: dist.ProcessGroup
) -> Iterator[AdamShard]:
    for expert, layout, group in ((False, buffers.dense, dp), (True, buffers.expert, edp)):
        if layout is not None:
            yield AdamShard(FlatBuffer([spec for spec in specs if spec.expert == expert], layout), group)
