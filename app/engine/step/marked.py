"""Marks for the watchdog in what a rank captures (`app.engine.watchdog.marks`).

Built only for watched runs with cuda_graph.marks=true. Transformer Engine's graphs have none: it
captures them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.engine.capture.recorder import Graph, Recorder, Recording, Work
from app.engine.capture.static import StaticMemory
from app.engine.capture.tree import flatten
from app.engine.step.executor import Transport
from app.engine.watchdog.marks import MarkedGraph, Marks
from app.engine.watchdog.watchdog import Watchdog
from app.model.block import Phase
from app.model.chunk import Chunk
from app.plan.actions import P2POp


@dataclass(slots=True)
class MarkedRecording:
    """Recording whose launches are noted."""

    recording: Recording
    graph: MarkedGraph
    marks: Marks

    @property
    def outputs(self) -> Sequence[Tensor]:
        """See the protocol."""
        return self.recording.outputs

    def replay(self) -> Sequence[Tensor]:
        """See the protocol."""
        self.graph.launch(self.marks.activity.doing)
        return self.recording.replay()

    def release(self) -> None:
        """See the protocol."""
        self.recording.release()


@dataclass(slots=True)
class MarkingRecorder:
    """Recorder that puts marks into what another one records."""

    inner: Recorder
    marks: Marks

    def record(self, work: Work, pool: int) -> tuple[Recording, Sequence[Tensor]]:
        """Record the work with marks; see the protocol."""
        graph = self.marks.new_graph()

        def run() -> Sequence[Tensor]:
            with self.marks.recording(graph):
                return work()

        graph.launch(self.marks.activity.doing)
        recording, outputs = self.inner.record(run, pool)
        self.marks.recorded(graph)
        marked = MarkedRecording(recording, graph, self.marks)
        self.inner.recordings[-1] = marked
        return marked, outputs

    @property
    def recordings(self) -> list[Graph]:
        """See the protocol."""
        return self.inner.recordings

    @recordings.setter
    def recordings(self, recordings: list[Graph]) -> None:
        self.inner.recordings = recordings

    @property
    def static(self) -> StaticMemory:
        """See the protocol."""
        return self.inner.static

    @static.setter
    def static(self, static: StaticMemory) -> None:
        self.inner.static = static

    @property
    def seconds(self) -> float:
        """See the protocol."""
        return self.inner.seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self.inner.seconds = seconds

    @property
    def object_bytes(self) -> int:
        """See the protocol."""
        return self.inner.object_bytes

    @object_bytes.setter
    def object_bytes(self, object_bytes: int) -> None:
        self.inner.object_bytes = object_bytes

    @property
    def pool_bytes(self) -> int:
        """See the protocol."""
        return self.inner.pool_bytes

    def recording_into(self, pool: int) -> AbstractContextManager[object]:
        """See the protocol."""
        return self.inner.recording_into(pool)

    def release(self) -> None:
        """See the protocol."""
        self.inner.release()


@dataclass(slots=True, kw_only=True)
class MarkedTransport(Transport):
    """Transport that marks where a device waits for sends and receives."""

    marks: Marks

    def wait(self, ops: Sequence[P2POp]) -> None:
        """See `Transport`."""
        self.marks.waits_for(self.named(ops))
        Transport.wait(self, ops)


def mark_graphs(
    watchdog: Watchdog,
    recorder: Recorder,
    transport: Transport,
    chunks: Sequence[Chunk],
    *,
    device: torch.device,
) -> tuple[Recorder, Transport]:
    """Have the watchdog see into the graphs of a rank; returns its recorder and transport."""
    watchdog.marks = marks = Marks(device, watchdog.main)
    mark_phases(chunks, marks)
    marked = MarkedTransport(transport.group, transport.ranks, transport.batched, marks=marks)
    return MarkingRecorder(recorder, marks), marked


def mark_phases(chunks: Sequence[Chunk], marks: Marks) -> None:
    """Mark the phases of all layers, as layers run within graphs."""
    for chunk in chunks:
        for index, layer in zip(chunk.layers, chunk.in_order, strict=True):
            layer.phases = tuple(
                replace(phase, run=_marked(phase, f"layer {index} {phase.name.value}", marks))
                for phase in layer.phases
            )


def _marked(phase: Phase, place: str, marks: Marks) -> Callable[..., tuple[object, ...]]:
    def run(*inputs: object) -> tuple[object, ...]:
        if marks.current is None:
            return phase.run(*inputs)
        before = marks.place
        marks.enter(place)
        outputs = phase.run(*inputs)
        marks.move(before)
        _mark_backward(place, marks, inputs, outputs)
        return outputs

    return run


def _mark_backward(
    place: str, marks: Marks, inputs: Sequence[object], outputs: Sequence[object]
) -> None:
    """Mark where the backward of a phase begins, and know where it ends.

    It begins at the nodes of autograd that made its outputs, of which several may share one. The
    gradient of an output may be there long before: a phase also hands on its input.
    """

    def leave(_: Tensor) -> None:
        if marks.place == place:
            marks.move("")

    def enter(_: tuple[Tensor, ...]) -> None:
        if marks.place != place:
            marks.enter(place)

    taken, made = _differentiable(inputs), _differentiable(outputs)
    for node in {x.grad_fn for x in made} - {x.grad_fn for x in taken}:
        if node is not None:
            node.register_prehook(enter)
    if taken:
        taken[0].register_hook(leave)


def _differentiable(values: Sequence[object]) -> list[Tensor]:
    return [tensor for tensor in flatten(tuple(values))[0] if tensor.requires_grad]
