"""Activations of one microbatch in one stage on one rank, and a rank's peak over its actions.

A stage is a row of parts: embedding, layers, head. Forward adds what each one saves, and backward
frees it from the other end, so the peak of a part comes on top of what the parts before it save.
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
    part_operations,
    saved_positions,
    sizes_of,
    stage_parts,
)
from app.plan.parts.trace import Sizes, TraceMemory, trace_memory
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
    s = sizes_of(run, layout, known=known)
    parts = stage_parts(run, stage)
    again = s.recompute
    every = {part: part_operations(s, part, again.usual) for part in set(parts)}
    ops = [op for part in parts for op in every[part]]
    phases = captured_phases(run.cuda_graph)
    usual = _microbatch(s, stage, again.usual)
    same = again.usual == again.spared
    return ChunkActivations(
        usual,
        usual if same else _microbatch(s, stage, again.spared),
        border=s.stream,
        deferred=max((op.deferred for op in ops), default=0),
        kernels=sum(op.kernels for op in ops),
        captured=sum(op.kernels for op in ops if op.phase in phases),
    )


def _microbatch(s: Sizes, stage: Stage, recompute: RecomputeChoice) -> MicrobatchMemory:
    parts = stage_parts(s.run, stage)
    found = {part: _part_memory(s, part, recompute) for part in set(parts)}
    kept: Counter[str] = Counter()
    ropes = {*map(saved_positions, parts)} - {None}
    if ropes:
        # cosines and sines of each kind of positions
        kept["rotary"] = len(ropes) * s.rotary
    forward = backward = saved = kept.total()
    waiting = waits = sum(found[part].waiting for part in parts)
    # the gradient of an embedding that is used again is alive from there to the lookup's backward
    tied = stage.embedding and stage.head and s.model.copies_embedding and not s.splits
    tied = tied and "embedding" not in frozen_in(s.run)
    for part in parts:
        memory = found[part]
        waits -= memory.waiting
        carried = s.weight(table(s.model)) if tied and part is not parts[-1] else 0
        forward = max(forward, saved + memory.forward)
        backward = max(backward, saved + memory.backward + waits + carried)
        kept.update(memory.kept)
        saved = kept.total()
    return MicrobatchMemory(kept, forward - saved, backward - saved, waiting=waiting)


def _part_memory(s: Sizes, part: StagePart, recompute: RecomputeChoice) -> TraceMemory:
    def traced() -> TraceMemory:
        return trace_memory(part_operations(s, part, recompute), s.stream)

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


def find_peak(
    actions: Sequence[Action],
    chunks: Sequence[ChunkActivations],
    spared: AbstractSet[MicrobatchChunk] = frozenset(),
) -> Peak:
    """Return the peak of a training step; of equally high ones the first.

    Between the two parts of a split backward only what weight gradients need stays.
    """
    live: Counter[tuple[int, bool]] = Counter()  # (chunk, spared) -> from forward to backward
    held, waiting, most = 0, 0, -1
    found = Peak({}, 0, 0, action="", in_flight=0)
    for action in actions:
        if not isinstance(action, Compute):
            continue
        key = action.chunk, (action.mb, action.chunk) in spared
        chunk = chunks[action.chunk]
        memory = chunk.spared if key[1] else chunk.usual
        working = memory.backward
        if action.letter == "F":
            held, working = held + memory.total, memory.forward
            live[key] += 1
        elif action.letter == "W":
            working = chunk.deferred
        if held + waiting + working > most:
            most = held + waiting + working
            kept: Counter[str] = Counter()
            for (nth, less), count in live.items():
                each = chunks[nth].spared if less else chunks[nth].usual
                kept.update({phase: count * size for phase, size in each.kept.items() if count})
            found = Peak(kept, waiting, working, action=str(action), in_flight=live.total())
        if action.letter == "W":
            waiting -= memory.waiting
        elif action.letter != "F":
            held, waiting = held - memory.total, waiting + memory.waiting * (action.letter == "I")
            live[key] -= 1
    return found
