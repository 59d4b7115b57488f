"""Microbatches in flight on this rank: their tensors between forward, P2P and backward.

Read `app.model.layers.weight_grads` first: a `WeightGrad` is a weight gradient that is not computed
yet, and a `WeightGradQueue` holds those that a split backward defers.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, D hidden, E experts, M
microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from app.engine.capture.partial import PartialGraphs
from app.engine.step.data_feed import StepInput
from app.model.block import RoutingReport
from app.model.chunk import Chunk
from app.model.layers.layer_groups import rank
from app.model.layers.weight_grads import AddGrad, MainGradSink, WeightGradQueue, WeightGradSink
from app.plan.actions import MicrobatchChunk, P2POp
from app.plan.recompute import RankRecompute


@dataclass(frozen=True, slots=True)
class RankStages:
    """This rank's chunks, and the description of tensors sent between stages."""

    chunks: Sequence[Chunk]
    next_here: Mapping[int, int]  # chunk -> own chunk of the next stage; other chunks use P2P
    recompute: RankRecompute  # what backward recomputes
    hidden: torch.Size  # shape between stages: B, S / tp, D
    dtype: torch.dtype  # between stages
    device: torch.device
    sink: MainGradSink | None = None  # fuses weight GEMMs into main gradients; None uses autograd
    graphs: PartialGraphs | None = None  # captured parts of the chunks' layers in training


@dataclass(slots=True)
class StepTotals:
    """Sums over this rank's microbatches, on the device."""

    loss: Tensor | float = 0.0  # weighted token losses, nats
    aux_loss: Tensor | float = 0.0  # weighted balancing losses of all MoE layers
    z_loss: Tensor | float = 0.0  # weighted router z-losses of all MoE layers
    # chunk, n-th MoE layer -> tokens per expert [E]
    counts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    dropped: Tensor | int = 0  # choices of experts beyond their capacity

    def add(self, chunk: int, routing: Sequence[RoutingReport], weight: float) -> None:
        """Count a microbatch's routing in a chunk; `weight`: factor on its router losses."""
        for layer, report in enumerate(routing):
            self.aux_loss = self.aux_loss + report.aux_loss * weight
            self.z_loss = self.z_loss + report.z_loss * weight
            self.dropped = self.dropped + report.dropped
            # adding 0 copies the first counts: a graph's replay may overwrite the report's memory
            self.counts[chunk, layer] = report.counts_E + self.counts.get((chunk, layer), 0)


class InFlight:
    """Tensors that an action leaves for a later one; empty at the end of the step."""

    def __init__(self, stages: RankStages, step: StepInput, training: bool, splits: bool) -> None:
        self.stages = stages
        self.step = step
        self.training = training
        self.splits = splits
        self.totals = StepTotals()
        # hidden states from the stage before; autograd leaves, so that they get a gradient
        self.inputs: dict[MicrobatchChunk, Tensor] = {}
        # hidden states to the stage after, detached
        self.outputs: dict[MicrobatchChunk, Tensor] = {}
        # roots of backward: hidden states or the loss, and router losses
        self.roots: dict[MicrobatchChunk, list[Tensor]] = {}
        self.output_grads: dict[MicrobatchChunk, Tensor] = {}  # from the stage after
        self.input_grads: dict[MicrobatchChunk, Tensor] = {}  # to the stage before
        # weight-gradient work that BackwardInput leaves for BackwardWeight
        self.weight_grads: dict[MicrobatchChunk, WeightGradQueue] = {}

    def forward(self, mb: int, chunk: int) -> None:
        """Run the forward of a microbatch through a chunk."""
        key = (mb, chunk)
        module = self.stages.chunks[chunk]
        batch = self.step.batches[mb]
        x = batch.tokens_BS if module.first else self.inputs[key]
        sink: WeightGradSink | None = self.stages.sink
        if self.splits:
            sink = self.weight_grads.setdefault(key, WeightGradQueue(self.stages.sink))
        recompute = self.stages.recompute.of(key)
        context = module.context(batch.positions_BS, batch.ends_BD, sink, recompute=recompute)
        graphs = self.stages.graphs if self.training else None
        runners = graphs and graphs.layer_runners(mb, chunk, context)
        out = module(x, context, runners)
        self.totals.add(chunk, out.routing, self.step.routing_weight)
        root = out.x
        if module.last:
            root = module.loss(out.x, batch.labels_BS, context) * self.step.loss_weights_M[mb]
            if rank(module.layer_groups.tp) == 0:  # all tensor-parallel ranks have the same loss
                self.totals.loss = self.totals.loss + root.detach()
        else:
            self._pass_on(key, out.x.detach())
        if self.training:
            losses = [report.loss for report in out.routing if report.loss.requires_grad]
            self.roots[key] = [root, *(loss * self.step.routing_weight for loss in losses)]
        else:
            self.inputs.pop(key, None)

    def _pass_on(self, key: MicrobatchChunk, output_BSD: Tensor) -> None:
        mb, chunk = key
        if chunk in self.stages.next_here:
            self.inputs[mb, self.stages.next_here[chunk]] = output_BSD.requires_grad_(self.training)
        else:
            self.outputs[key] = self._to_send(chunk, output_BSD)

    def _to_send(self, chunk: int, value: Tensor) -> Tensor:
        """Return `value`, or a copy if a graph could overwrite it while a send still reads it."""
        graphs = self.stages.graphs if self.training else None
        return value.clone() if graphs is not None and graphs.copies_sent(chunk) else value

    def backward(self, mb: int, chunk: int) -> None:
        """Run the backward of a microbatch through a chunk, from its output gradient or loss."""
        key = (mb, chunk)
        module = self.stages.chunks[chunk]
        roots = self.roots.pop(key)
        scale = self.step.scale
        # The loss starts with the loss scale as its gradient (None: 1); hidden states with the
        # gradient from the next stage, which is scaled already. Router losses are scaled here.
        grad_out = scale if module.last else self.output_grads.pop(key)
        torch.autograd.backward(roots, [grad_out, *(scale for _ in roots[1:])])
        if module.first:
            return
        grad = self.inputs.pop(key).grad
        assert grad is not None, "a chunk's output depends on its input"
        before = {after: chunk for chunk, after in self.stages.next_here.items()}
        if chunk in before:
            self.output_grads[mb, before[chunk]] = grad
        else:
            self.input_grads[key] = self._to_send(chunk, grad)

    def weight_gradients(self, mb: int, chunk: int, add: AddGrad) -> None:
        """Run the weight part of a split backward: add gradients to the main gradients."""
        self.weight_grads.pop((mb, chunk)).run(add)

    def tensor_of(self, op: P2POp) -> Tensor:
        """Return the tensor that an operation sends, or a new one that it receives into."""
        key = op.mb, op.chunk
        if op.send:
            held = self.outputs if op.flow == "F" else self.input_grads
            held[key] = held[key].contiguous()  # kept until the send is done
            return held[key]
        stages = self.stages
        arriving = torch.empty(stages.hidden, dtype=stages.dtype, device=stages.device)
        (self.inputs if op.flow == "F" else self.output_grads)[key] = arriving
        return arriving

    def complete(self, ops: Sequence[P2POp]) -> None:
        """Finish operations: received tensors may be used, sent gradients are dropped."""
        for op in ops:
            key = op.mb, op.chunk
            if not op.send and op.flow == "F":
                # only after the receive, which writes into the tensor in place
                self.inputs[key].requires_grad_(self.training)
            elif op.send and op.flow == "B":
                del self.input_grads[key]

    def free(self, mb: int, chunk: int) -> None:
        """Deallocate a sent output: backward needs only its `grad_fn`."""
        memory = self.outputs.pop((mb, chunk)).untyped_storage()
        if memory.resizable():  # a graph's output lies in memory of the graph, which stays
            memory.resize_(0)

    def expect_empty(self) -> None:
        """Raise AssertionError if a tensor of the step was never used or freed."""
        left = {
            name: sorted(getattr(self, name))
            for name in (
                "inputs",
                "outputs",
                "roots",
                "output_grads",
                "input_grads",
                "weight_grads",
            )
        }
        assert not any(left.values()), f"left at the end of the step: {left}"
