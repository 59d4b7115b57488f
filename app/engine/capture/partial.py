"""Graphs of parts of layers: the interval of phases captured of each, by the sets and slots of a
plan (`app.plan.graphs`).
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
from app.model.layers import Context
from app.optim.distributed import DistributedOptimizer
from app.plan.graphs import GraphPlan

# hidden states -> the values that leave a captured part, by name
Inside = Callable[[Tensor], dict[str, object]]


class PartialGraphs:
    """The captured parts of a rank's layers.

    A microbatch's forward through a chunk asks for `layer_runners`, one per layer, and gives them
    to the chunk. The first microbatch of a set records its graphs where the schedule comes to them,
    so what dies between two of them frees its memory for the second one exactly as in every replay.
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
        self.by_set: dict[tuple[int, int, int], Inside] = {}  # chunk, set, layer

    def before_step(self, batch: Batch) -> None:
        """Get ready for a step with graphs; `batch`: a microbatch of it. Here there is nothing to
        do, since recordings are made on the way.
        """

    def layer_runners(self, mb: int, chunk: int, context: Context) -> list[RunPhases]:
        """How each layer of a chunk runs for a microbatch: captured where it has an interval."""
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
        """Whether what a chunk sends, either way, must first be copied out of graphs' memory."""
        ranges = self.ranges[chunk]
        at_border = bool(ranges) and (
            _starts(ranges[0]) or _ends(ranges[-1], self.layers[chunk][-1])
        )
        return self.plan.copy_sent and at_border

    def _static_context(self, slot: int, context: Context) -> Context:
        """The microbatch's context in its slot's memory, which recordings can read.

        A recording keeps the context of the microbatch that it was made with, so the rest of it is
        the same for all: the rules refuse a split backward, with a sink per microbatch, and whole
        layers recomputed for some of them.
        """

        def placed(name: str, value: Tensor) -> Tensor:
            return self.recorder.static.buffer("context", name, slot)(value).copy_(value)

        mask = context.mask_B1SK
        return replace(
            context,
            cos_BS1H=placed("cos_BS1H", context.cos_BS1H),
            sin_BS1H=placed("sin_BS1H", context.sin_BS1H),
            mask_B1SK=None if mask is None else placed("mask_B1SK", mask),
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
        before = (
            run_phases(phases[: phase_range.start], values, keep=("x",))
            if phase_range.start
            else values
        )
        key = chunk, self.plan.set_of(mb, chunk), nth
        if key not in self.by_set:
            function = self.inside(chunk, nth, static, keep)
            self.by_set[key] = self._new_interval(mb, chunk, nth, function=function)
        inside = self.by_set[key](value_of(before, "x", Tensor))
        return run_layer(phases[phase_range.stop :], {**values, **inside}, keep)

    def _new_interval(self, mb: int, chunk: int, nth: int, *, function: Inside) -> Inside:
        plan = self.plan
        static = self.recorder.static
        after_another = nth > 0 and self._chained(chunk, nth - 1)
        before_another = nth + 1 < len(self.ranges[chunk]) and self._chained(chunk, nth)

        def grad_buffer(nth_output: int) -> Buffer | None:
            if before_another and nth_output == 0:  # made by the one behind, in its memory
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
        """Whether the next layer's part begins where that of the n-th layer of a chunk ends."""
        ranges = self.ranges[chunk]
        return _starts(ranges[nth + 1]) and _ends(ranges[nth], self.layers[chunk][nth])

    def inside(self, chunk: int, nth: int, static: Context, keep: Sequence[str]) -> Inside:
        """What is captured of a layer, as a function.

        Of the values that it makes those leave that later phases read, or that are to be kept of
        the layer. Hidden states come first, as `_new_interval` expects of what a chained interval
        reads.
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
    """Whether a captured part begins with its layer."""
    return phase_range is not None and phase_range.start == 0


def _ends(phase_range: PhaseRange | None, layer: Layer) -> bool:
    """Whether a captured part goes on to the end of its layer."""
    return phase_range is not None and phase_range.stop == len(layer.phases)
