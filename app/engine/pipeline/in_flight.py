"""The microbatches under way on this rank: their tensors between forward, exchange and backward.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.choices import Recompute
from app.engine.capture.partial import PartialGraphs
from app.engine.pipeline.data_feed import StepInput
from app.model.chunk import Chunk
from app.model.deferred import AddGrad, DirectSums, WeightQueue
from app.model.peers import rank
from app.moe.phases import RoutingReport
from app.plan.actions import Op

Place = tuple[int, int]  # microbatch, chunk


@dataclass(frozen=True, slots=True)
class Stages:
    """This rank's chunks and what lies between them."""

    chunks: Sequence[Chunk]
    # chunk -> chunk of this rank that holds the stage after it; the others send
    next_here: Mapping[int, int]
    recompute: Mapping[Place, bool]  # microbatches in chunks that keep only the inputs of layers
    phases: Collection[Recompute]  # parts of layers that the others compute again
    hidden: torch.Size  # of what moves between stages: B, S / tp, D
    dtype: torch.dtype  # of what moves
    device: torch.device
    # where gradients of weights go at once; None: autograd takes them
    sums: DirectSums | None = None
    graphs: PartialGraphs | None = None  # captured parts of the chunks' layers in training


@dataclass(slots=True)
class StepTotals:
    """Sums over this rank's microbatches, on the device."""

    loss: Tensor | float = 0.0  # weighted token losses, nats
    aux_loss: Tensor | float = 0.0  # weighted balancing losses of all MoE layers
    z_loss: Tensor | float = 0.0  # weighted router z-losses of all MoE layers
    # (chunk, n-th MoE layer) -> tokens per expert
    counts: dict[Place, Tensor] = field(default_factory=dict)
    dropped: Tensor | int = 0  # choices of experts beyond their capacity

    def add(self, chunk: int, routing: Sequence[RoutingReport], weight: float) -> None:
        """Count a microbatch's routing in a chunk; `weight`: its share of the routers' losses."""
        for layer, report in enumerate(routing):
            self.aux_loss = self.aux_loss + report.aux_loss * weight
            self.z_loss = self.z_loss + report.z_loss * weight
            self.dropped = self.dropped + report.dropped
            # A sum in memory of its own, also of the first: the report may lie where a graph writes
            # the next one.
            self.counts[chunk, layer] = report.counts_E + self.counts.get((chunk, layer), 0)


class Flight:
    """Everything that an action leaves for a later one; empty when the step is over."""

    def __init__(self, stages: Stages, step: StepInput, training: bool, splits: bool) -> None:
        self.stages = stages
        self.step = step
        self.training = training
        self.splits = splits
        self.totals = StepTotals()
        # hidden states from the stage before; leaves, so that they get a gradient
        self.inputs: dict[Place, Tensor] = {}
        self.outputs: dict[Place, Tensor] = {}  # hidden states for the stage after, detached
        # where backward starts: hidden states or the loss, and routers' losses
        self.roots: dict[Place, list[Tensor]] = {}
        self.output_grads: dict[Place, Tensor] = {}  # from the stage after
        self.input_grads: dict[Place, Tensor] = {}  # for the stage before
        # gradients of weights that a split backward has left
        self.weights: dict[Place, WeightQueue] = {}

    def forward(self, mb: int, chunk: int) -> None:
        """Forward of one microbatch through one chunk."""
        place = (mb, chunk)
        module = self.stages.chunks[chunk]
        batch = self.step.batches[mb]
        x = batch.tokens_BS if module.first else self.inputs[place]
        later = self.weights.setdefault(place, WeightQueue()) if self.splits else self.stages.sums
        full = self.training and self.stages.recompute.get(place, False)
        context = module.context(
            batch.positions_BS, batch.documents_BS, later, () if full else self.stages.phases
        )
        graphs = self.stages.graphs if self.training else None
        out = module(x, context, full, graphs and graphs.runs(mb, chunk, context))
        self.totals.add(chunk, out.routing, self.step.routing_weight)
        root = out.x
        if module.last:
            root = module.loss(out.x, batch.labels_BS, context) * self.step.loss_weights_M[mb]
            if rank(module.peers.tp) == 0:  # all tensor-parallel ranks have the same loss
                self.totals.loss = self.totals.loss + root.detach()
        else:
            self._pass_on(place, out.x.detach())
        if self.training:
            routing = (
                report.loss * self.step.routing_weight
                for report in out.routing
                if report.loss.requires_grad
            )
            self.roots[place] = [root, *routing]
        else:
            self.inputs.pop(place, None)

    def _pass_on(self, place: Place, output_BSD: Tensor) -> None:
        mb, chunk = place
        if chunk in self.stages.next_here:
            self.inputs[mb, self.stages.next_here[chunk]] = output_BSD.requires_grad_(self.training)
        else:
            self.outputs[place] = self._to_send(chunk, output_BSD)

    def _to_send(self, chunk: int, value: Tensor) -> Tensor:
        """`value`, or a copy where graphs would overwrite it while a send still reads it."""
        graphs = self.stages.graphs if self.training else None
        return value.clone() if graphs is not None and graphs.copies_sent(chunk) else value

    def backward(self, mb: int, chunk: int) -> None:
        """From the gradient of a chunk's output, or its loss, to those of input and weights."""
        place = (mb, chunk)
        module = self.stages.chunks[chunk]
        roots = self.roots.pop(place)
        scale = self.step.scale
        grads = [
            scale if module.last else self.output_grads.pop(place),
            *(scale for _ in roots[1:]),
        ]
        torch.autograd.backward(roots, grads)
        if module.first:
            return
        grad = self.inputs.pop(place).grad
        assert grad is not None, "a chunk's output depends on its input"
        before = {after: chunk for chunk, after in self.stages.next_here.items()}
        if chunk in before:
            self.output_grads[mb, before[chunk]] = grad
        else:
            self.input_grads[place] = self._to_send(chunk, grad)

    def weight_gradients(self, mb: int, chunk: int, add: AddGrad) -> None:
        """The rest of a split backward."""
        self.weights.pop((mb, chunk)).run(add)

    def moved(self, op: Op) -> Tensor:
        """What an operation sends, or where it puts what it receives."""
        place = op.mb, op.chunk
        if op.send:
            held = self.outputs if op.flow == "F" else self.input_grads
            held[place] = held[place].contiguous()
            return held[place]
        arriving = torch.empty(
            self.stages.hidden, dtype=self.stages.dtype, device=self.stages.device
        )
        (self.inputs if op.flow == "F" else self.output_grads)[place] = arriving
        return arriving

    def settle(self, ops: Sequence[Op]) -> None:
        """Operations are done: what arrived may be used, gradients that have left are dropped."""
        for op in ops:
            place = op.mb, op.chunk
            if not op.send and op.flow == "F":
                self.inputs[place].requires_grad_(self.training)
            elif op.send and op.flow == "B":
                del self.input_grads[place]

    def free(self, mb: int, chunk: int) -> None:
        """Give back the memory of an output that has been sent; backward needs its history only."""
        memory = self.outputs.pop((mb, chunk)).untyped_storage()
        if memory.resizable():  # what a graph has written lies in memory of the graph
            memory.resize_(0)

    def expect_landed(self) -> None:
        """Assert that nothing is left."""
        left = {
            name: sorted(getattr(self, name))
            for name in ("inputs", "outputs", "roots", "output_grads", "input_grads", "weights")
        }
        assert not any(left.values()), f"left at the end of the step: {left}"
