"""Partial CUDA graphs captured by Transformer Engine's `make_graphed_callables`.

One call captures the graphs of a pool, in the order of the schedule, after a warm-up run. This
happens before a step begins: the warm-up leaves values in main gradients, router counters and FP8
amax records, which every step resets at its start, and Transformer Engine restores the state of
random number generators. It gets the order of the plan (`PoolOrder`), and reuses inputs and memory
for later graphs by that order.

The modules passed to it show no parameters: their gradients are added to the main gradients within
the graphs, as with our own capture, so Transformer Engine has no gradients to return or copy.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s of them between matrices, D
hidden.
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
from app.engine.capture.partial import CapturedFunction, PartialGraphs
from app.engine.capture.recorder import Recorder
from app.engine.capture.tree import Rebuild, flatten
from app.errors import ConfigError
from app.model.block import LAYER_OUTPUTS
from app.model.chunk import Chunk
from app.model.layers.layers import Context
from app.model.layers.transformer_engine import INSTALL, import_library
from app.optim.distributed import DistributedOptimizer
from app.optim.grad_buckets import Arrival
from app.plan.graphs import GraphPlan, PoolOrder
from app.plan.recompute import RecomputeChoice
from app.torch_versions import unowned

NEEDED = ("_order", "_num_layers_per_chunk", "_reuse_graph_input_output_buffers", "pool",
          "num_warmup_iters", "capture_time_hooks")  # fmt: skip


class Graphed(Protocol):
    """Captured part as returned by Transformer Engine."""

    def __call__(self, x_BsD: Tensor) -> tuple[Tensor, ...]:
        """Replay the forward; autograd replays the backward."""

    def reset(self) -> None:
        """Destroy its graphs, unless that was done before."""


MakeGraphed = Callable[..., Sequence[Graphed]]


def graphed_callables() -> MakeGraphed:
    """Return Transformer Engine's `make_graphed_callables`. Raises ConfigError if missing."""
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
    """Captured part of a layer as passed to Transformer Engine.

    Only Transformer Engine calls it, for the sets of a pool in the order of their forwards: once in
    a warm-up run of all, and once under capture.
    """

    def __init__(self, insides: Sequence[CapturedFunction]) -> None:
        super().__init__()
        self.turns = itertools.cycle(insides)
        self.rebuild: Rebuild[dict[str, object]] | None = None
        self.differentiable: list[bool] = []  # per output tensor
        self.gradients: tuple[tuple[torch.Size, torch.dtype], ...] = ()  # of differentiable ones
        self.arrivals: list[Arrival] = []  # of parameter gradients, in one backward

    def forward(self, x_BsD: Tensor) -> tuple[Tensor, ...]:
        """Return the output tensors for hidden states, those with gradients first."""
        found, self.rebuild = flatten(next(self.turns)(x_BsD))
        # Transformer Engine keeps the address and shape of outputs, but no strides
        outputs = [output.contiguous() for output in found]
        self.differentiable = [output.requires_grad for output in outputs]
        known = [output for output in outputs if output.requires_grad]
        others = [output for output in outputs if not output.requires_grad]
        if known:
            # Transformer Engine lets parts with equal gradient shapes share a list of gradients,
            # whose length includes outputs without gradient. Leading dimensions of 1 make shapes
            # differ where the numbers of such outputs do.
            known[0] = known[0].view(*[1] * len(others), *known[0].shape)
        self.gradients = tuple((each.shape, each.dtype) for each in known)
        return *known, *others

    def put_together(self, outputs: Sequence[Tensor]) -> dict[str, object]:
        """Rebuild the values by name from the output tensors."""
        assert self.rebuild is not None, "set during capture"
        count = sum(self.differentiable)
        known, others = list(outputs[:count]), outputs[count:]
        if known:
            known[0] = known[0].view(known[0].shape[len(others) :])
        # Transformer Engine makes every floating-point output differentiable
        with_grad, without = iter(known), (output.detach() for output in others)
        return self.rebuild([next(with_grad if grad else without) for grad in self.differentiable])

    def took(self, listed: list[Arrival]) -> None:
        """Store the gradients that arrived in a finished backward; empties the list."""
        self.arrivals = list(listed)
        listed.clear()


@dataclass(slots=True)
class GraphOf:
    """One of the two graphs of a part; its outputs are known after the first replay."""

    part: Graphed
    outputs: Sequence[Tensor] = ()

    def release(self) -> None:
        """Destroy both graphs of the part."""
        self.part.reset()


@dataclass(slots=True)
class GraphedInterval:
    """Captured part of one layer for one set; counterpart of `CapturedInterval`."""

    part: CapturedPart
    replay: Graphed
    optimizer: DistributedOptimizer
    forward_graph: GraphOf = field(init=False)
    backward_graph: GraphOf = field(init=False)

    def __post_init__(self) -> None:
        self.forward_graph, self.backward_graph = GraphOf(self.replay), GraphOf(self.replay)

    def __call__(self, x_BsD: Tensor) -> dict[str, object]:
        """Run the interval on hidden states and return its outputs by name."""
        x_BsD = x_BsD.view_as(x_BsD)  # a view of our own, so that the hook sees only this gradient
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
    """Captured parts of a rank's layers; `make` captures all of them before a step.

    `hidden_BsD` has the shape and type of hidden states; nothing is written to it.
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
        self.on_trial = on_trial  # context for runs of layers that belong to no step

    def before_step(self, batch: Batch) -> None:
        """Capture everything at the first call; `batch` is a microbatch of the step."""
        if self.by_set:
            return
        sink = self.optimizer.main_grad_sink()
        contexts = [
            chunk.context(batch.positions_BS, batch.ends_BD, sink, recompute=self.recompute)
            for chunk in self.chunks
        ]
        with self.on_trial():
            for pool, order in self.plan.orders.items():
                self._capture(pool, order, contexts)

    def _capture(self, pool: int, order: PoolOrder, contexts: Sequence[Context]) -> None:
        """Capture the graphs of a pool.

        Parts are ordered by chunk and layer, their graphs by chunk, set and layer.
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
                num_warmup_iters=1,  # the minimum: eager steps have warmed up everything
                pool=handle,
                capture_time_hooks=[take] * len(parts),
                _order=list(order.order),
                _num_layers_per_chunk=[len(layers) for _, _, layers in sets],
                _reuse_graph_input_output_buffers=True,
            )
        captured = iter(made)  # ordered as `_samples`
        for chunk, mbs, layers in sets:
            for mb, nth in itertools.product(mbs, layers):
                interval = GraphedInterval(parts[chunk, nth], next(captured), self.optimizer)
                self.recorder.recordings += [interval.forward_graph, interval.backward_graph]
                self.by_set[chunk, self.plan.set_of(mb, chunk), nth] = interval
        # Parts with equal gradient shapes share memory for them: count each kind once.
        for kinds in {part.gradients for part in parts.values()}:
            size = sum(shape.numel() * dtype.itemsize for shape, dtype in kinds)
            self.recorder.static.elsewhere[pool, kinds] = size

    def _insides(
        self, chunk: int, nth: int, mbs: Sequence[int], *, context: Context
    ) -> list[CapturedFunction]:
        slots = (self.plan.slot_of(mb, chunk) for mb in mbs)
        return [
            self.captured_function(chunk, nth, self._static_context(slot, context), LAYER_OUTPUTS)
            for slot in slots
        ]

    def _samples(self, pool: int, order: PoolOrder) -> list[tuple[Tensor]]:
        """Return each part's sample input, by chunk, set and layer.

        It is a static buffer, or a placeholder that nothing may write to if Transformer Engine
        reuses the free buffer of an earlier graph.
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

    def _new_interval(
        self, mb: int, chunk: int, nth: int, *, function: CapturedFunction
    ) -> CapturedFunction:
        raise AssertionError("all are captured before the step")
