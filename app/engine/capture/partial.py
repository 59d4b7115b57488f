"""Partial CUDA graphs: one captured interval of phases per layer, by set and slot of a plan.

A set is an instance of a chunk's graphs, a slot the static inputs of a microbatch, a pool a CUDA
graph memory pool (`app.plan.graphs`).

Shapes: B sequences, s tokens per sequence of this rank, D hidden; others as in
`app.model.layers.layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from app.data.feed import Batch
from app.engine.capture.interval import CapturedInterval, PhaseRange
from app.engine.capture.recorder import Recorder
from app.engine.capture.static import Buffer
from app.model.block import Layer, Phase, RunPhases, run_layer, run_phases, value_of
from app.model.chunk import Chunk
from app.model.layers.layers import Context
from app.optim.distributed import DistributedOptimizer
from app.plan.graphs import GraphPlan

# hidden states -> outputs of a captured part, by name
CapturedFunction = Callable[[Tensor], dict[str, object]]


class PartialGraphs:
    """Captured parts of a rank's layers.

    A microbatch's forward through a chunk asks for `layer_runners`, one per layer, and passes them
    to the chunk. The first microbatch of a set records its graphs in the order of the schedule, so
    memory freed between two recordings is reused by the second exactly as in every replay.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        plan: GraphPlan,
        phase_names: Collection[str],
        recorder: Recorder,
        optimizer: DistributedOptimizer,
    ) -> None:
        self.plan = plan
        self.recorder = recorder
        self.optimizer = optimizer
        self.layers = [chunk.in_order for chunk in chunks]
        self.ranges = [
            [PhaseRange.of(layer.phases, phase_names) for layer in layers] for layers in self.layers
        ]
        self.by_set: dict[tuple[int, int, int], CapturedFunction] = {}  # chunk, set, layer

    def before_step(self, batch: Batch) -> None:
        """Prepare a step with graphs, of which `batch` is one microbatch.

        No-op here: recordings are made during the step.
        """

    def layer_runners(self, mb: int, chunk: int, context: Context) -> list[RunPhases]:
        """Return how to run each layer of a chunk for a microbatch: by graph if it has one."""
        if not any(self.ranges[chunk]):
            return [run_layer] * len(self.ranges[chunk])
        static = self._static_context(self.plan.slot_of(mb, chunk), context)
        return [
            run_layer
            if phase_range is None
            else partial(self._run, mb, chunk, nth, phase_range, static)
            for nth, phase_range in enumerate(self.ranges[chunk])
        ]

    def copies_sent(self, chunk: int) -> bool:
        """True if a chunk must copy the tensors it sends, either way, out of graph memory."""
        ranges = self.ranges[chunk]
        at_border = bool(ranges) and (
            _starts(ranges[0]) or _ends(ranges[-1], self.layers[chunk][-1])
        )
        return self.plan.copy_sent and at_border

    def _static_context(self, slot: int, context: Context) -> Context:
        """Copy the microbatch's context to its slot's static memory, which recordings read.

        A recording keeps all other fields of the context it was made with, so these must be equal
        for all microbatches: config rules refuse a split backward, with a sink per microbatch, and
        layers recomputed for only some microbatches.
        """

        def placed(name: str, value: Tensor) -> Tensor:
            return self.recorder.static.buffer("context", name, slot)(value).copy_(value)

        documents = context.documents
        return replace(
            context,
            rotary={
                rope: table.moved(f"rotary {n}", placed)
                for n, (rope, table) in enumerate(context.rotary.items())
            },
            documents=documents
            and [each.moved(f"documents {n}", placed) for n, each in enumerate(documents)],
        )

    def _run(
        self,
        mb: int,
        chunk: int,
        nth: int,
        phase_range: PhaseRange,
        static: Context,
        phases: Sequence[Phase],
        values: Mapping[str, object],
        keep: Sequence[str],
    ) -> dict[str, object]:
        """Run a layer for a microbatch: phases before the captured part, the part, the rest."""
        before = (
            run_phases(phases[: phase_range.start], values, keep=("x",))
            if phase_range.start
            else values
        )
        key = chunk, self.plan.set_of(mb, chunk), nth
        if key not in self.by_set:  # the first microbatch of a set records its graphs
            function = self.captured_function(chunk, nth, static, keep)
            self.by_set[key] = self._new_interval(mb, chunk, nth, function=function)
        inside = self.by_set[key](value_of(before, "x", Tensor))
        return run_layer(phases[phase_range.stop :], {**values, **inside}, keep)

    def _new_interval(
        self, mb: int, chunk: int, nth: int, *, function: CapturedFunction
    ) -> CapturedFunction:
        """Build the interval of a layer, with static buffers where it is not chained."""
        plan = self.plan
        static = self.recorder.static
        after_another = nth > 0 and self._chained(chunk, nth - 1)
        before_another = nth + 1 < len(self.ranges[chunk]) and self._chained(chunk, nth)

        def grad_buffer(nth_output: int) -> Buffer | None:
            if before_another and nth_output == 0:  # the next interval's input gradient, in place
                return None
            return static.buffer("gradient", nth_output)

        slot = plan.slot_of(mb, chunk)
        input_buffer = None if after_another else static.buffer("input", slot, nth)
        return CapturedInterval(
            function,
            self.recorder,
            plan.pool_of(mb, chunk),
            optimizer=self.optimizer,
            input_buffer=input_buffer,
            grad_buffer=grad_buffer,
        )

    def _chained(self, chunk: int, nth: int) -> bool:
        """True if the next layer's captured part begins where that of layer `nth` ends."""
        ranges, layers = self.ranges[chunk], self.layers[chunk]
        follows = layers[nth + 1].follows
        return follows and _starts(ranges[nth + 1]) and _ends(ranges[nth], layers[nth])

    def captured_function(
        self, chunk: int, nth: int, static: Context, keep: Sequence[str]
    ) -> CapturedFunction:
        """Return the captured part of a layer as a function.

        It returns the values that later phases read, and those of `keep`. Hidden states come
        first: `_new_interval` expects a chained interval to read output 0.
        """
        phase_range = self.ranges[chunk][nth]
        assert phase_range is not None, "this layer has a captured part"
        phases = self.layers[chunk][nth].phases
        within = phases[phase_range.start : phase_range.stop]
        made = {name for phase in within for name in phase.outputs}
        read = {name for phase in phases[phase_range.stop :] for name in phase.inputs}.union(keep)
        leave = sorted(made & read, key=lambda name: (name != "x", name))

        def run(x_BsD: Tensor) -> dict[str, object]:
            context = replace(static, recompute=static.recompute.afresh())
            with context.recompute.forward():
                return run_layer(within, {"x": x_BsD, "context": context}, leave)

        return run


def _starts(phase_range: PhaseRange | None) -> bool:
    """True if a captured part begins with its layer's first phase."""
    return phase_range is not None and phase_range.start == 0


def _ends(phase_range: PhaseRange | None, layer: Layer) -> bool:
    """True if a captured part ends with its layer's last phase."""
    return phase_range is not None and phase_range.stop == len(layer.phases)
