"""Execute one step's list of actions on this rank: all forwards, backwards, P2P and reductions.

Schedules differ in the list; this file is the same for all. `Executor` is the loop, `InFlight` has
the tensors between forward, P2P and backward, and `Transport` sends them between pipeline ranks.

Read `app.model.layers.weight_grads` first: a `WeightGrad` is a weight gradient that is not computed
yet, and a `WeightGradQueue` holds those that a split backward defers.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, D hidden, E experts, M
microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from app.data.feed import Batch
from app.engine.capture.partial import PartialGraphs
from app.engine.step.records import StepInput, StepTotals
from app.engine.watchdog.watchdog import Watchdog
from app.model.chunk import Chunk, TokenLosses
from app.model.layers.layer_groups import rank
from app.model.layers.layers import Context
from app.model.layers.weight_grads import (
    AddGrad,
    MainGradSink,
    WeightGrad,
    WeightGradQueue,
    WeightGradSink,
)
from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Free,
    GatherParams,
    MicrobatchChunk,
    P2POp,
    ReduceGrads,
    Wait,
)
from app.plan.recompute import RankRecompute
from app.plan.schedule import last_backwards


@dataclass(slots=True)
class Transport:
    """P2P between pipeline ranks; all tensors have the same shape, known in advance."""

    group: dist.ProcessGroup
    ranks: Sequence[int]  # pipeline rank -> global rank
    batched: bool = True  # all operations of an action in one batch; False: one by one
    works: dict[P2POp, dist.Work] = field(default_factory=dict)  # not yet waited for
    # all of this step; kept after their wait, which with NCCL returns before they are done
    moving: dict[P2POp, dist.Work] = field(default_factory=dict)

    def post(self, tensors: Mapping[P2POp, Tensor]) -> None:
        """Start to send or receive each operation's tensor, which is in use until `wait`."""
        kinds = {True: dist.isend, False: dist.irecv}
        p2p = [
            dist.P2POp(kinds[op.send], tensor, self.ranks[op.peer], self.group)
            for op, tensor in tensors.items()
        ]
        if self.batched:
            works = dist.batch_isend_irecv(p2p)
        else:
            works = [each.op(each.tensor, each.peer, self.group) for each in p2p]
        if len(works) == 1:  # NCCL returns one work for the whole batch
            works = works * len(p2p)
        self.works.update(zip(tensors, works, strict=True))
        if not _capturing():
            self.moving.update(zip(tensors, works, strict=True))

    def wait(self, ops: Sequence[P2POp]) -> None:
        """Wait until these operations are done (NCCL: the current stream waits, not the host)."""
        for op in ops:
            self.works.pop(op).wait()
            if dist.get_backend(self.group) != "nccl":
                self.moving.pop(op, None)  # done; the work would keep its tensor alive

    def unfinished(self) -> list[tuple[str, int]]:
        """Return operations of this step not yet done, oldest first: (description, other rank).

        Thread-safe: it iterates over a copy, since the main thread keeps running.
        """
        return self.named(
            [op for op, work in self.moving.copy().items() if not work.is_completed()]
        )

    def named(self, ops: Sequence[P2POp]) -> list[tuple[str, int]]:
        """Return (description, other rank) of operations."""
        ranks = [self.ranks[op.peer] for op in ops]
        ways = ["to" if op.send else "from" for op in ops]
        named = zip(ops, ways, ranks, strict=True)
        return [(f"{op} ({way} rank {rank})", rank) for op, way, rank in named]

    def forget(self) -> None:
        """Drop the works of a step. Raises AssertionError if one was never waited for."""
        assert not self.works, f"never waited for: {', '.join(map(str, self.works))}"
        self.moving.clear()


def _capturing() -> bool:
    """True while the current stream is captured: a query of a captured event, as in
    `Transport.unfinished`, invalidates the capture.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# a last chunk, its output B × s × D, the microbatch, the chunk's context -> the losses
LossOf = Callable[[Chunk, Tensor, Batch, Context], TokenLosses]


def chunk_losses(chunk: Chunk, x_BsD: Tensor, batch: Batch, context: Context) -> TokenLosses:
    """Return the chunk's losses."""
    return chunk.losses_of(x_BsD, batch.labels_BS, context)


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
    losses: LossOf = chunk_losses


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
        context = module.context(
            batch.positions_BS,
            batch.ends_BD,
            sink,
            recompute=recompute,
            extras=batch.extras,
        )
        graphs = self.stages.graphs if self.training else None
        runners = graphs and graphs.layer_runners(mb, chunk, context)
        out = module(x, context, runners)
        self.totals.add(chunk, out.routing, self.step.routing_weight)
        root = out.x
        if module.last:
            losses = self.stages.losses(module, out.x, batch, context)
            root = losses.objective * self.step.loss_weights_M[mb]
            if rank(module.layer_groups.tp) == 0:  # all tensor-parallel ranks have the same loss
                told = losses.told
                told = root.detach() if told is None else told * self.step.loss_weights_M[mb]
                self.totals.loss = self.totals.loss + told
        else:
            self._pass_on(key, out.x.detach())
        if self.training:
            of_routers = [each.loss for each in out.routing if each.loss.requires_grad]
            self.roots[key] = [root, *(loss * self.step.routing_weight for loss in of_routers)]
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


class Parameters(Protocol):
    """Interface of the optimizer to the executor."""

    def start_gather(self, chunk: int) -> None:
        """All-gather a chunk's parameters, or make the first use of each wait for that."""

    def add_grad(self, param: nn.Parameter, gradient: WeightGrad) -> None:
        """Add to the main gradient of a parameter."""

    def expect_grads(self, chunk: int, last: bool) -> None:
        """Announce a backward of a chunk; `last`: it is the chunk's last one in this step."""

    def reduce_grads(self, chunk: int) -> None:
        """Reduce a chunk's gradients over data-parallel ranks, after its last microbatch."""


ForwardBackward = Callable[[StepInput], StepTotals]


class Executor:
    """A rank's list of actions, bound to what they work on; autograd is off if none is a
    backward.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        stages: RankStages,
        params: Parameters,
        transport: Transport,
        watchdog: Watchdog,
        in_flight: Callable[..., InFlight] = InFlight,
    ) -> None:
        self.in_flight = in_flight
        self.actions = actions
        self.stages = stages
        self.params = params
        self.transport = transport
        self.watchdog = watchdog
        self.names = [str(action) for action in actions]
        self.last = last_backwards(actions)  # places after which a chunk's gradients are complete
        self.training = any(isinstance(each, Backward | BackwardInput) for each in actions)
        self.splits = any(isinstance(each, BackwardWeight) for each in actions)

    def __call__(self, step: StepInput) -> StepTotals:
        """Run the actions over the microbatches of `step`."""
        in_flight = self.in_flight(self.stages, step, self.training, splits=self.splits)
        with torch.set_grad_enabled(self.training):
            for place, action in enumerate(self.actions):
                self.watchdog.note(self.names[place])
                with record_function(self.names[place]), _blame(self.names, place):
                    self._run(action, in_flight, last=place in self.last)
        in_flight.expect_empty()
        self.transport.forget()
        self.watchdog.note("the end of the step")
        return in_flight.totals

    def _run(self, action: Action, in_flight: InFlight, last: bool) -> None:
        """Run an action; `last`: it is the last backward of its chunk."""
        match action:
            case GatherParams(chunk):
                self.params.start_gather(chunk)
            case Forward(mb, chunk):
                in_flight.forward(mb, chunk)
            case Backward(mb, chunk) | BackwardInput(mb, chunk):
                self.params.expect_grads(chunk, last=last)
                in_flight.backward(mb, chunk)
            case BackwardWeight(mb, chunk):
                in_flight.weight_gradients(mb, chunk, self.params.add_grad)
            case Exchange(ops):
                self.transport.post({op: in_flight.tensor_of(op) for op in ops})
            case Wait(ops):
                self.transport.wait(ops)
                in_flight.complete(ops)
            case Free(mb, chunk):
                in_flight.free(mb, chunk)
            case ReduceGrads(chunk):
                self.params.reduce_grads(chunk)
            case _:
                raise AssertionError(f"no way to run {action}")


@contextmanager
def _blame(names: Sequence[str], place: int) -> Iterator[None]:
    """Add the list of actions, with the failing one marked, to an error raised in the block."""
    try:
        yield
    except Exception as error:
        before, after = " ".join(names[:place]), " ".join(names[place + 1 :])
        marked = f"{before} >>> {names[place]} <<< {after}"
        error.add_note(f"while running this rank's actions: {marked}")
        raise
