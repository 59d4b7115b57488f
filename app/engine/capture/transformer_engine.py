"""Graphs of parts of layers, captured by Transformer Engine's `make_graphed_callables`.

It captures the graphs of a pool in one call, in the order of the schedule, after it has run them
once. That is done before a step begins: what the runs leave in gradient sums, in what routers
count and in what products in FP8 note is what every step clears at its start, and
Transformer Engine itself puts back the state of random numbers. It is told the order of the plan
(`PoolOrder`), and hands inputs and memory on to later graphs by the same order.

What it is given has no parameters that it would know of: their gradients go to their sums within
what is captured, as with our own graphs, so there is nothing that it would have to return or copy.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from app.choices import GraphImpl
from app.data.feed import Batch
from app.engine.capture.partial import Inside, PartialGraphs
from app.engine.capture.recorder import Recorder
from app.engine.capture.tree import Rebuild, flatten
from app.errors import ConfigError
from app.model.block import LEAVES
from app.model.chunk import Chunk
from app.model.layers import Context
from app.model.transformer_engine import INSTALL, import_library
from app.optim.distributed import DistributedOptimizer
from app.optim.grad_buckets import Arrival
from app.plan.graphs import GraphPlan, PoolOrder
from app.plan.recompute import RecomputeChoice
from app.torch_versions import unowned

NEEDED = ("_order", "_num_layers_per_chunk", "_reuse_graph_input_output_buffers", "pool",
          "num_warmup_iters", "capture_time_hooks")  # fmt: skip


class Graphed(Protocol):
    """A captured part, as Transformer Engine gives it back."""

    def __call__(self, x_BsD: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward; autograd replays the backward."""

    def reset(self) -> None:
        """Destroy its graphs, if that has not been done."""


MakeGraphed = Callable[..., Sequence[Graphed]]


def graphed_callables() -> MakeGraphed:
    """Transformer Engine's `make_graphed_callables`. ConfigError where it cannot be had."""
    make: MakeGraphed | None = getattr(import_library(_refusal), "make_graphed_callables", None)
    if make is None:
        raise _refusal("Transformer Engine is too old: it has no make_graphed_callables")
    lacks = [name for name in NEEDED if name not in inspect.signature(make).parameters]
    if lacks:
        raise _refusal(f"Transformer Engine is too old: make_graphed_callables lacks {lacks[0]}")
    return make


def _refusal(rule: str) -> ConfigError:
    advice = f"{INSTALL}, or cuda_graph.impl=local"
    return ConfigError("cuda_graph.impl", GraphImpl.transformer_engine, rule, advice=advice)


class CapturedPart(nn.Module):
    """The captured part of a layer, as Transformer Engine is given it.

    It is called for the sets of a pool in turn, in the order of their forwards, and by Transformer
    Engine alone: once in a trial run of all, and once under capture.
    """

    def __init__(self, insides: Sequence[Inside]) -> None:
        super().__init__()
        self.turns = itertools.cycle(insides)
        self.rebuild: Rebuild[dict[str, object]] | None = None
        self.differentiable: list[bool] = []  # of the tensors that leave
        self.gradients: tuple[tuple[torch.Size, torch.dtype], ...] = ()  # of those that are
        self.arrivals: list[Arrival] = []  # of gradients, in one backward

    def forward(self, x_BsD: Tensor) -> tuple[Tensor, ...]:
        """Hidden states -> the tensors that leave, those with gradients first."""
        found, self.rebuild = flatten(next(self.turns)(x_BsD))
        # of what leaves Transformer Engine keeps address and shape, and no strides
        outputs = [output.contiguous() for output in found]
        self.differentiable = [output.requires_grad for output in outputs]
        known = [output for output in outputs if output.requires_grad]
        others = [output for output in outputs if not output.requires_grad]
        if known:
            # Parts whose gradients have equal shapes share memory for these, which Transformer
            # Engine counts with the other outputs: so shapes differ where the numbers of these do.
            known[0] = known[0].view(*[1] * len(others), *known[0].shape)
        self.gradients = tuple((each.shape, each.dtype) for each in known)
        return *known, *others

    def put_together(self, outputs: Sequence[Tensor]) -> dict[str, object]:
        """From what has left: the values by name."""
        assert self.rebuild is not None, "its capture has settled how they are put together"
        count = sum(self.differentiable)
        known, others = list(outputs[:count]), outputs[count:]
        if known:
            known[0] = known[0].view(known[0].shape[len(others) :])
        # Transformer Engine has all tensors of floating point numbers differentiable
        with_grad, without = iter(known), (output.detach() for output in others)
        return self.rebuild([next(with_grad if grad else without) for grad in self.differentiable])

    def took(self, listed: list[Arrival]) -> None:
        """A backward is over, and these gradients have arrived in it; empties the list."""
        self.arrivals = list(listed)
        listed.clear()


@dataclass(slots=True)
class GraphOf:
    """One of the two graphs of a part: where its outputs lie, known from its first replay on."""

    part: Graphed
    outputs: Sequence[Tensor] = ()

    def release(self) -> None:
        """Destroy both graphs of the part."""
        self.part.reset()


@dataclass(slots=True)
class GraphedInterval:
    """The part of one layer for one set, as `CapturedInterval`."""

    part: CapturedPart
    replay: Graphed
    optimizer: DistributedOptimizer
    forward_graph: GraphOf = field(init=False)
    backward_graph: GraphOf = field(init=False)

    def __post_init__(self) -> None:
        self.forward_graph, self.backward_graph = GraphOf(self.replay), GraphOf(self.replay)

    def __call__(self, x_BsD: Tensor) -> dict[str, object]:
        """Hidden states -> the values that leave the interval, by name."""
        x_BsD = x_BsD.view_as(x_BsD)  # its gradient comes from the graph alone
        x_BsD.register_hook(self._replayed_backward)
        outputs = self.replay(x_BsD)
        if not self.forward_graph.outputs:
            self.forward_graph.outputs = [unowned(output) for output in outputs]
        return self.part.put_together(outputs)

    def _replayed_backward(self, grad_BsD: Tensor) -> None:
        if not self.backward_graph.outputs:
            self.backward_graph.outputs = [unowned(grad_BsD)]
        self.optimizer.count_listed(self.part.arrivals)


class GraphsByTransformerEngine(PartialGraphs):
    """The captured parts of a rank's layers; `make` captures all of them before a step.

    `hidden_BsD` is like the hidden states that enter a layer; nothing is written to it.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        plan: GraphPlan,
        phase_names: Collection[str],
        recorder: Recorder,
        optimizer: DistributedOptimizer,
        *,
        make: MakeGraphed,
        hidden_BsD: Tensor,
        recompute: RecomputeChoice,
        on_trial: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(chunks, plan, phase_names, recorder=recorder, optimizer=optimizer)
        self.chunks = chunks
        self.make = make
        self.hidden_BsD = hidden_BsD
        self.recompute = recompute
        self.on_trial = on_trial  # layers run within it, and not for a step

    def before_step(self, batch: Batch) -> None:
        """Capture everything, unless it has been; `batch`: a microbatch of the step."""
        if self.by_set:
            return
        sink = self.optimizer.main_grad_sink()
        contexts = [
            chunk.context(batch.positions_BS, batch.documents_BS, sink, recompute=self.recompute)
            for chunk in self.chunks
        ]
        with self.on_trial():
            for pool, order in self.plan.orders.items():
                self._capture(pool, order, contexts)

    def _capture(self, pool: int, order: PoolOrder, contexts: Sequence[Context]) -> None:
        """The graphs of a pool. Parts come by chunk and layer, what is captured of them by chunk,
        set and layer.
        """
        sets = [
            (chunk, mbs, [nth for nth, part in enumerate(self.ranges[chunk]) if part is not None])
            for chunk, mbs in zip(order.chunks, order.firsts, strict=True)
        ]
        parts = {
            (chunk, nth): CapturedPart(self._insides(chunk, nth, mbs, context=contexts[chunk]))
            for chunk, mbs, layers in sets
            for nth in layers
        }
        with (
            self.optimizer.listing_arrivals() as listed,
            self.recorder.recording_into(pool) as handle,
        ):
            take = {"backward_hooks": {0: lambda part: part.took(listed)}}
            made = self.make(
                tuple(parts.values()),
                self._samples(pool, order),
                num_warmup_iters=1,  # the least: eager steps have prepared all that is used
                pool=handle,
                capture_time_hooks=[take] * len(parts),
                _order=list(order.order),
                _num_layers_per_chunk=[len(layers) for _, _, layers in sets],
                _reuse_graph_input_output_buffers=True,
            )
        captured = iter(made)
        for chunk, mbs, layers in sets:
            for mb, nth in itertools.product(mbs, layers):
                interval = GraphedInterval(parts[chunk, nth], next(captured), self.optimizer)
                self.recorder.recordings += [interval.forward_graph, interval.backward_graph]
                self.by_set[chunk, self.plan.set_of(mb, chunk), nth] = interval
        for kinds in {part.gradients for part in parts.values()}:
            size = sum(shape.numel() * dtype.itemsize for shape, dtype in kinds)
            self.recorder.static.elsewhere[pool, kinds] = size

    def _insides(
        self, chunk: int, nth: int, mbs: Sequence[int], *, context: Context
    ) -> list[Inside]:
        slots = (self.plan.slot_of(mb, chunk) for mb in mbs)
        return [
            self.inside(chunk, nth, self._static_context(slot, context), LEAVES) for slot in slots
        ]

    def _samples(self, pool: int, order: PoolOrder) -> list[tuple[Tensor]]:
        """What each part is captured with, by chunk, set and layer: its static input, or where
        Transformer Engine gives it one that is free again, nothing that could be written to.
        """
        samples: dict[tuple[int, int, int], Tensor] = {}
        forwards = Counter[int]()
        inputs = free = 0
        for number in order.order:
            layers = self.plan.layers[order.chunks[abs(number) - 1]]
            if number < 0:
                free += layers
                continue
            for nth in range(layers):
                sample_BsD = self.hidden_BsD
                if free:
                    free -= 1
                else:
                    buffer = self.recorder.static.buffer("input", pool, inputs)
                    sample_BsD = buffer(self.hidden_BsD).detach().zero_().requires_grad_()
                    inputs += 1
                samples[number, forwards[number], nth] = sample_BsD
            forwards[number] += 1
        return [(samples[place],) for place in sorted(samples)]

    def _new_interval(self, mb: int, chunk: int, nth: int, *, function: Inside) -> Inside:
        raise AssertionError("all are captured before the step")
