"""Memory of a trace: what autograd saves, and what is alive at every operation.

A tensor's memory is freed after its last reader unless an operation has saved it. Saving a view
saves its whole storage. A second gradient of a tensor is added to the first in place. All numbers
are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from app.plan.parts.trace import (
    ForwardTrace,
    GradAddition,
    Operation,
    Segment,
    Trace,
    TracedTensor,
)


@dataclass(frozen=True, slots=True)
class TraceMemory:
    """Memory of a trace; what is alive includes the trace's input and saved tensors."""

    kept: Mapping[str, int]  # phase -> what autograd saves of it from forward to backward
    forward: Mapping[str, int]  # phase -> most that is alive in its forward
    backward: Mapping[str, int]  # phase -> most that is alive in its backward
    waiting: int  # inputs of weight gradients between the two parts of a split backward
    deferred: int  # most memory of one of them in the second part

    @property
    def total(self) -> int:
        """All that is saved."""
        return sum(self.kept.values())


def trace_memory(traced: ForwardTrace) -> TraceMemory:
    """Return what `traced` saves, and bytes alive in its forward and backward, by phase."""
    trace = traced.trace
    saved_by = _saved_by(traced.trace)
    dropped = _dropped(trace, saved_by)
    kept = _kept(trace, saved_by, dropped)
    forward = _forward(traced, saved_by.keys() - dropped)
    backward = _backward(traced, saved_by, dropped, kept=sum(kept.values()))
    return TraceMemory(
        kept,
        forward,
        backward,
        waiting=_waiting(trace),
        deferred=max((op.deferred or 0 for op in trace.ops), default=0),
    )


@dataclass(frozen=True, slots=True)
class CapturedMemory:
    """Memory that some phases of a trace, captured as one graph, leave behind."""

    kept: Mapping[str, int]  # phase -> what autograd saves of inputs and outputs of these phases
    own: int  # of that, what only these phases read
    cut: int  # outputs of these phases that others read, saved or not
    gradients: int  # gradients of these outputs

    @property
    def total(self) -> int:
        """All that is saved."""
        return sum(self.kept.values())


def captured_memory(traced: ForwardTrace, phases: Collection[str]) -> CapturedMemory:
    """Return the memory of the phases of a trace that one graph holds; all 0 without phases."""
    if not phases:
        return CapturedMemory({}, 0, 0, gradients=0)
    trace = traced.trace
    saved_by = _saved_by(traced.trace)
    mine = {storage for op in trace.ops if op.phase in phases for storage in op.new}
    given = {
        value.storage for op in trace.ops if op.phase in phases for value in (*op.reads, *op.saves)
    } - mine
    cut = {
        value.storage
        for op in trace.ops
        if op.phase not in phases
        for value in (*op.reads, *op.saves, *op.holds)
    } & mine
    if traced.result is not None and traced.result.storage in mine:
        cut.add(traced.result.storage)
    dropped = _dropped(trace, saved_by)
    kept = {storage: places for storage, places in saved_by.items() if storage in mine | given}
    own = {storage: places for storage, places in kept.items() if storage in mine - cut}
    total = _kept(trace, kept, dropped, phases=phases)
    differentiable = {storage for op in trace.ops if op.reads for storage in op.new}
    crossing, back = (
        sum(trace.storages[storage] for storage in part) for part in (cut, cut & differentiable)
    )
    return CapturedMemory(
        total, sum(_kept(trace, own, dropped, phases=phases).values()), crossing, gradients=back
    )


def _saved_by(trace: Trace) -> dict[int, list[int]]:
    """Return storage -> indices of the operations that save it, in order."""
    found: dict[int, list[int]] = {}
    for place, op in enumerate(trace.ops):
        for value in op.saves:
            found.setdefault(value.storage, []).append(place)
    return found


def _dropped(trace: Trace, saved_by: Mapping[int, Sequence[int]]) -> dict[int, Segment]:
    """Return saved storages that are recomputed or paged -> the segment that restores them.

    A paged tensor is a segment of its own: it is copied back by itself.
    """
    found = {
        storage: Segment(-1 - storage, discards=True)
        for storage in trace.paged
        if storage in saved_by
    }
    for op in (op for op in trace.ops if op.segment):
        assert op.segment is not None
        for storage in op.new:
            inside = all(
                trace.ops[place].segment == op.segment for place in saved_by.get(storage, ())
            )
            if storage in saved_by and (inside or op.segment.discards):
                found[storage] = op.segment
    return found


def _kept(
    trace: Trace,
    saved_by: Mapping[int, Sequence[int]],
    dropped: Mapping[int, Segment],
    phases: Collection[str] | None = None,
) -> dict[str, int]:
    """Return phase -> bytes of these storages, by first saver, and of statistics.

    phases: None counts the statistics of all.
    """
    kept: dict[str, int] = {}
    for storage, places in saved_by.items():
        if storage not in dropped:
            phase = trace.ops[places[0]].phase
            kept[phase] = kept.get(phase, 0) + trace.storages[storage]
    for op in trace.ops:
        if op.keeps and op.segment is None and (phases is None or op.phase in phases):
            kept[op.phase] = kept.get(op.phase, 0) + op.keeps
    return kept


def _forward(traced: ForwardTrace, stays: set[int]) -> dict[str, int]:
    """Return phase -> most that is alive in forward."""
    trace = traced.trace
    given = traced.given
    result = traced.result
    ends = {given.storage: -1}
    for place, op in enumerate(trace.ops):
        for value in (*op.reads, *op.makes, *op.saves, *op.holds):
            ends[value.storage] = place
    if result is not None:
        ends[result.storage] = len(trace.ops)
    freed: dict[int, int] = {}
    for storage, place in ends.items():
        if storage not in stays:
            freed[place] = freed.get(place, 0) + trace.storages[storage]
    live = trace.storages[given.storage]
    peaks = dict[str, int]()
    for place, op in enumerate(trace.ops):
        live += sum(trace.storages[storage] for storage in op.new) + op.keeps
        peaks[op.phase] = max(peaks.get(op.phase, 0), live + op.scratch[0])
        live -= freed.get(place, 0) + (op.keeps if op.segment else 0)
    return peaks


@dataclass(slots=True)
class _Gradient:
    """Memory of a gradient, which several tensors may share."""

    bytes: int
    owners: int = 0  # tensors whose gradient it is


def _backward(
    traced: ForwardTrace,
    saved_by: Mapping[int, Sequence[int]],
    dropped: Mapping[int, Segment],
    kept: int,
) -> dict[str, int]:
    """Return phase -> most that is alive in backward."""
    trace = traced.trace
    result = traced.result
    queued = {value.storage for op in trace.ops if op.waits for value in op.saves}
    last_use: dict[int, int] = {}  # operation -> bytes that are dead after it
    for storage, places in saved_by.items():
        if storage not in queued:
            last_use[places[0]] = last_use.get(places[0], 0) + trace.storages[storage]
    remade = _restored(trace, saved_by, dropped)
    gradients = _Gradients()
    if result is not None:
        gradients.give(result, _Gradient(result.bytes))
    live = kept
    peaks = dict[str, int]()
    for place, op in reversed(list(enumerate(trace.ops))):
        live += remade.get(place, 0)
        incoming = [gradients.of.pop(value) for value in op.makes if value in gradients.of]
        extra = gradients.spread(op, incoming)
        weight = op.weight if op.added is GradAddition.after else 0
        during = gradients.live + extra + weight + op.scratch[1]
        peaks[op.phase] = max(peaks.get(op.phase, 0), live + during)
        if not op.waits or op.waiting is not None:
            gradients.release(incoming)
        if op.waits and op.waiting is not None:
            gradients.live += op.waiting
        live -= last_use.get(place, 0) + op.keeps
    return peaks


def _restored(
    trace: Trace, saved_by: Mapping[int, Sequence[int]], dropped: Mapping[int, Segment]
) -> dict[int, int]:
    """Return the operation whose backward first needs a segment -> bytes that it restores."""
    first: dict[Segment, int] = {}
    sizes: dict[Segment, int] = {}
    for place, op in enumerate(trace.ops):
        if op.segment:
            first[op.segment] = place
            sizes[op.segment] = sizes.get(op.segment, 0) + op.keeps
    for storage, segment in dropped.items():
        first[segment] = max(first.get(segment, -1), saved_by[storage][-1])
        sizes[segment] = sizes.get(segment, 0) + trace.storages[storage]
    for op in trace.ops:  # recomputing an output of a paged tensor needs the paged tensor first
        for value in op.saves:
            if op.segment and value.storage in trace.paged:
                paged = dropped[value.storage]
                first[paged] = max(first[paged], first[op.segment])
    found: dict[int, int] = {}
    for segment, place in first.items():
        found[place] = found.get(place, 0) + sizes[segment]
    return found


@dataclass(slots=True)
class _Gradients:
    """Gradients that are alive."""

    of: dict[TracedTensor, _Gradient] = field(default_factory=dict)
    live: int = 0  # bytes

    def give(self, value: TracedTensor, gradient: _Gradient) -> int:
        """Add a gradient to that of a tensor.

        Return bytes that are needed only for the addition.
        """
        if gradient.owners == 0:
            self.live += gradient.bytes
        have = self.of.get(value)
        if have is None:
            gradient.owners += 1
            self.of[value] = gradient
            return 0
        if gradient.owners == 0:
            self.live -= gradient.bytes
            return gradient.bytes
        return 0

    def spread(self, op: Operation, incoming: Sequence[_Gradient]) -> int:
        """Create gradients of an operation's inputs.

        Return bytes that are needed only for additions.
        """
        if not incoming:
            incoming = [_Gradient(0)]
        return sum(
            self.give(value, incoming[0] if op.passes else _Gradient(value.bytes))
            for value in op.reads
        )

    def release(self, incoming: Sequence[_Gradient]) -> None:
        """Free the gradients of an operation's outputs."""
        for gradient in incoming:
            gradient.owners -= 1
            if gradient.owners == 0:
                self.live -= gradient.bytes


def _waiting(trace: Trace) -> int:
    """Return bytes that deferred weight gradients hold: inputs and output gradients, or FP8 copies.

    If the output is also saved, its gradient is written over it.
    """
    gemms = [op for op in trace.ops if op.waits]
    came = {value.storage for op in gemms for value in op.saves}
    went = sum(
        sum(value.bytes for value in op.makes if value not in op.saves)
        if op.waiting is None
        else op.waiting
        for op in gemms
    )
    return (
        sum(trace.storages[storage] for storage in came)
        + went
        + sum(op.carries for op in trace.ops)
    )
