"""Activations of one microbatch in one stage on one rank, and a rank's peak over its actions.

A stage is a row of parts: embedding, layers, head. Forward adds what each one saves, and backward
frees it from the other end, so the peak of a part comes on top of what the parts before it save.
What a layer offloads is on the GPU while that layer or the next one runs, forward and backward.
All numbers are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from app.config import Run
from app.plan.actions import Action, Compute, MicrobatchChunk
from app.plan.layout import ParallelLayout
from app.plan.model.vocabulary import table
from app.plan.parts.known import KnownParts
from app.plan.parts.stage import (
    StagePart,
    part_counts,
    part_operations,
    parts_of,
    saved_positions,
    sizes_of,
)
from app.plan.parts.trace import Sizes, TraceMemory, trace_memory
from app.plan.phases import PhaseName
from app.plan.recompute import RecomputeChoice
from app.plan.select import captured_phases
from app.plan.sharding.frozen import frozen_in
from app.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class MicrobatchMemory:
    """Memory of a microbatch from its forward to its backward."""

    kept: Mapping[str, int]  # phase -> bytes saved by autograd
    forward: int  # most that is alive in forward beyond what is saved in the end
    backward: int  # most that is alive in backward beyond what was saved at its start
    waiting: int  # inputs of weight gradients between the two parts of a split backward
    offloaded: int = 0  # saved in host memory
    total: int = field(init=False)  # all that autograd saves

    def __post_init__(self) -> None:
        # A walk along a schedule asks for this sum tens of thousands of times.
        object.__setattr__(self, "total", sum(self.kept.values()))


@dataclass(frozen=True, slots=True)
class ChunkActivations:
    """Memory of the microbatches of one chunk."""

    usual: MicrobatchMemory  # as most microbatches are recomputed
    spared: MicrobatchMemory  # those that save more (`RecomputePolicy.spared`)
    border: int  # hidden states at the border of a stage; their gradients are as large
    deferred: int  # most memory of one weight gradient in the second part of a split backward
    kernels: int  # kernel launches of a forward
    captured: int  # of these, those in partial graphs


def chunk_activations(
    run: Run, stage: Stage, layout: ParallelLayout, known: KnownParts | None = None
) -> ChunkActivations:
    """Return the memory of one microbatch in a stage, at the planned imbalance of experts.

    known: operations shared with plans of other runs.
    """
    return stage_activations(sizes_of(run, layout, known=known), stage)


def stage_activations(s: Sizes, stage: Stage) -> ChunkActivations:
    """Return the memory of one microbatch of these sizes in a stage."""
    again, counts = s.recompute, part_counts(s, stage)
    phases = captured_phases(s.run.cuda_graph)
    tolls = [(_part_toll(s, part, again.usual, phases), times) for part, times in counts]
    usual = _microbatch(s, stage, again.usual)
    same = again.usual == again.spared
    return ChunkActivations(
        usual,
        usual if same else _microbatch(s, stage, again.spared),
        border=s.stream,
        deferred=max((toll.deferred for toll, _ in tolls), default=0),
        kernels=sum(times * toll.kernels for toll, times in tolls),
        captured=sum(times * toll.captured for toll, times in tolls),
    )


@dataclass(frozen=True, slots=True)
class _Toll:
    """Numbers of `ChunkActivations` that are the same for every microbatch, of one part."""

    deferred: int
    kernels: int
    captured: int


def _part_toll(
    s: Sizes, part: StagePart, recompute: RecomputeChoice, phases: frozenset[str]
) -> _Toll:
    def counted() -> _Toll:
        ops = part_operations(s, part, recompute)
        return _Toll(
            max((op.deferred for op in ops), default=0),
            kernels=sum(op.kernels for op in ops),
            captured=sum(op.kernels for op in ops if op.phase in phases),
        )

    return counted() if s.known is None else s.known.sum(("toll", part, recompute, phases), counted)


def _microbatch(s: Sizes, stage: Stage, recompute: RecomputeChoice) -> MicrobatchMemory:
    parts = parts_of(s, stage)
    found = {part: _part_memory(s, part, recompute) for part, _ in part_counts(s, stage)}
    kept: Counter[str] = Counter()
    ropes = {*map(saved_positions, found)} - {None}
    if ropes:
        # cosines and sines of each kind of positions
        kept["rotary"] = len(ropes) * s.rotary
    # the stage's input stays on the GPU for its gradient
    stays = not stage.embedding and recompute.offloads(PhaseName.attn, s.stream)
    if stays:
        kept[PhaseName.attn] = s.stream
    forward = backward = saved = kept.total()
    waiting = waits = sum(times * found[part].waiting for part, times in part_counts(s, stage))
    # the gradient of an embedding that is used again is alive from there to the lookup's backward
    tied = stage.embedding and stage.head and s.model.copies_embedding and not s.splits
    tied = tied and "embedding" not in frozen_in(s.run)
    carried = s.weight(table(s.model)) if tied else 0
    away = {part: sum(memory.offloaded.values()) for part, memory in found.items()}
    totals = {part: sum(memory.kept.values()) - away[part] for part, memory in found.items()}
    for place, part in enumerate(parts):
        memory = found[part]
        waits -= memory.waiting
        beside = waits + (carried if place + 1 < len(parts) else 0)
        moving = away[parts[place - 1]] if place else 0
        forward = max(forward, saved + memory.forward + moving)
        backward = max(backward, saved + memory.backward + beside + moving)
        saved += totals[part]
    for part, times in part_counts(s, stage):
        memory = found[part]
        kept.update(
            {
                phase: times * (size - memory.offloaded.get(phase, 0))
                for phase, size in memory.kept.items()
            }
        )
    host = sum(times * away[part] for part, times in part_counts(s, stage)) - stays * s.stream
    return MicrobatchMemory(
        +kept, forward - saved, backward - saved, waiting=waiting, offloaded=host
    )


def _part_memory(s: Sizes, part: StagePart, recompute: RecomputeChoice) -> TraceMemory:
    def traced() -> TraceMemory:
        return trace_memory(part_operations(s, part, recompute), s.stream, recompute)

    return traced() if s.known is None else s.known.sum(("memory", part, recompute), traced)


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory of a rank at its peak, in bytes."""

    kept: Mapping[str, int]  # phase -> saved by autograd
    waiting: int  # for weight gradients of a split backward
    working: int  # alive only while the action runs
    action: str  # the action that runs at the peak
    in_flight: int  # microbatches with saved activations, counted once per chunk

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kept.values()) + self.waiting + self.working


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds while an action runs; walks along a schedule repeat few of them."""

    letter: str
    chunk: int
    spared: bool  # of the action's microbatch
    live: tuple[tuple[tuple[int, bool], int], ...]  # (chunk, spared) -> from forward to backward
    waiting: tuple[tuple[tuple[int, bool], int], ...]  # likewise, for weight gradients


Moments = Mapping[Moment, str]  # in order of their first actions, by name


def rank_moments(
    actions: Sequence[Action], spared: AbstractSet[MicrobatchChunk] = frozenset()
) -> Moments:
    """Return the different moments of a training step on a rank."""
    live: Counter[tuple[int, bool]] = Counter()
    waiting: Counter[tuple[int, bool]] = Counter()
    found: dict[Moment, str] = {}
    for action in actions:
        if not isinstance(action, Compute):
            continue
        letter, key = action.letter, (action.chunk, (action.mb, action.chunk) in spared)
        live[key] += letter == "F"
        now = Moment(letter, *key, live=tuple(live.items()), waiting=tuple(waiting.items()))
        if now not in found:
            found[now] = str(action)
        if letter == "W":
            waiting[key] -= 1
        elif letter != "F":
            live[key] -= 1
            waiting[key] += letter == "I"
    return found


def find_peak(
    actions: Sequence[Action],
    chunks: Sequence[ChunkActivations],
    spared: AbstractSet[MicrobatchChunk] = frozenset(),
) -> Peak:
    """Return the peak of a training step; of equally high ones the first.

    Between the two parts of a split backward only what weight gradients need stays.
    """
    return highest(rank_moments(actions, spared), chunks)


def highest(moments: Moments, chunks: Sequence[ChunkActivations]) -> Peak:
    """Return the peak among the moments of a rank; of equally high ones the first."""
    sizes = {
        (nth, less): chunk.spared if less else chunk.usual
        for nth, chunk in enumerate(chunks)
        for less in (False, True)
    }
    most, found = -1, None
    for moment in moments:
        memory = sizes[moment.chunk, moment.spared]
        held = sum(count * sizes[key].total for key, count in moment.live)
        held += sum(count * sizes[key].waiting for key, count in moment.waiting)
        held += _working(moment, memory, chunks)
        if held > most:
            most, found = held, moment
    if found is None:
        return Peak({}, 0, 0, action="", in_flight=0)
    kept: Counter[str] = Counter()
    for key, count in found.live:
        kept.update({phase: count * size for phase, size in sizes[key].kept.items() if count})
    return Peak(
        kept,
        sum(count * sizes[key].waiting for key, count in found.waiting),
        _working(found, sizes[found.chunk, found.spared], chunks),
        action=moments[found],
        in_flight=sum(count for _, count in found.live),
    )


def host_peak(moments: Moments, chunks: Sequence[ChunkActivations]) -> int:
    """Return the most bytes of host memory that a rank's activations are in."""
    return max(
        sum(
            count * (chunks[chunk].spared if less else chunks[chunk].usual).offloaded
            for (chunk, less), count in moment.live
        )
        for moment in moments
    )


def _working(moment: Moment, memory: MicrobatchMemory, chunks: Sequence[ChunkActivations]) -> int:
    """Return the bytes that are alive only while the moment's action runs."""
    if moment.letter == "F":
        return memory.forward
    return chunks[moment.chunk].deferred if moment.letter == "W" else memory.backward
