"""Activations of one microbatch in one stage on one rank, and other memory alive meanwhile.

A stage is a row of traces: embedding, layers, head. Forward adds what each one saves, and backward
frees it from the other end, so the peak of a trace comes on top of what the traces before it save.
All numbers are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from app.config import Run
from app.plan.layout import ParallelLayout
from app.plan.model.vocabulary import table
from app.plan.parts.lifetimes import (
    CapturedMemory,
    TraceMemory,
    captured_memory,
    trace_memory,
)
from app.plan.parts.parts import Sizes, sizes_of
from app.plan.parts.stage import StagePart, part_trace, stage_parts
from app.plan.parts.trace import ForwardTrace
from app.plan.recompute import RecomputeChoice
from app.plan.select import captured_phases
from app.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class GraphShare:
    """Memory of a microbatch's partial graphs besides their static inputs; 0 without graphs."""

    kept: int  # saved by autograd for the graphs' own backward
    cut: int  # produced inside and read outside
    # captured phases of a layer -> gradients of their outputs
    gradients: Mapping[tuple[str, ...], int]
    context: int  # cosines, sines and mask, shared by the layers
    scratch: int  # alive only while a graph runs
    kernels: int  # kernel launches of all their forwards
    cublas: bool  # any of them has GEMMs by cuBLAS


@dataclass(frozen=True, slots=True)
class MicrobatchMemory:
    """Memory of a microbatch from its forward to its backward, outside of partial graphs."""

    kept: Mapping[str, int]  # phase -> bytes saved by autograd
    forward: int  # most that is alive in forward beyond what is saved in the end
    backward: int  # most that is alive in backward beyond what was saved at its start
    waiting: int  # inputs of weight gradients between the two parts of a split backward
    graph: GraphShare
    total: int = field(init=False)  # all that autograd saves
    pool: int = field(init=False)  # what its partial graphs hold until their backward

    def __post_init__(self) -> None:
        # A walk along a schedule asks for these sums tens of thousands of times.
        object.__setattr__(self, "total", sum(self.kept.values()))
        object.__setattr__(self, "pool", self.graph.kept + self.graph.cut)


@dataclass(frozen=True, slots=True)
class ChunkActivations:
    """Memory of the microbatches of one chunk."""

    usual: MicrobatchMemory  # as most microbatches are recomputed
    spared: MicrobatchMemory  # those that save more (`RecomputePolicy.spared`)
    border: int  # hidden states at the border of a stage; their gradients are as large
    takes: bool  # hidden states come in; otherwise tokens
    gives: bool  # hidden states go out; otherwise the loss ends here
    deferred: int  # most memory of one weight gradient in the second part of a split backward
    kernels: int  # kernel launches of a forward
    cublas: bool  # any of its GEMMs is by cuBLAS


@dataclass(frozen=True, slots=True)
class _Link:
    """Memory of one trace of the row, and the share of it that a partial graph holds."""

    memory: TraceMemory
    graph: CapturedMemory
    captured: Collection[str]  # phases that the graph holds
    kernels: Mapping[str, int]  # phase -> launches
    cublas: Set[str]  # phases with GEMMs by cuBLAS

    @property
    def inside(self) -> tuple[str, ...]:
        """Phases of this trace that the graph holds."""
        return tuple(phase for phase in self.kernels if phase in self.captured)

    @property
    def kept(self) -> int:
        """Bytes that autograd saves outside of the graph."""
        return self.memory.total - self.graph.total

    def peak(self, alive: Mapping[str, int]) -> int:
        """Return the most that is alive in the other phases, without what the graph saves."""
        others = (size for phase, size in alive.items() if phase not in self.captured)
        return max(others, default=self.graph.total) - self.graph.total

    def scratch(self) -> int:
        """Return the most that is alive in the graph beyond what it leaves behind."""
        both = (*self.memory.forward.items(), *self.memory.backward.items())
        mine = (size for phase, size in both if phase in self.captured)
        return max(mine, default=self.graph.total) - self.graph.total


def chunk_activations(run: Run, stage: Stage, layout: ParallelLayout) -> ChunkActivations:
    """Return the memory of one microbatch in a stage, at the planned imbalance of experts."""
    s = sizes_of(run, layout)
    tied = StagePart.tied_head in stage_parts(s.model, stage)
    carried = s.weight(table(s.model)) if tied and not s.splits else 0
    recompute = s.recompute
    row = _row(s, stage, recompute.spared)
    spared = _memory(s, row, carried, shared=_shared(s, stage, recompute.spared))
    usual = spared
    if recompute.usual != recompute.spared:
        shared = _shared(s, stage, recompute.usual)
        usual = _memory(s, _row(s, stage, recompute.usual), carried, shared=shared)
    deferred = max((link.memory.deferred for link in row), default=0)  # a stage may be empty
    kernels = sum(sum(link.kernels.values()) for link in row)
    return ChunkActivations(
        usual,
        spared,
        s.stream,
        takes=not stage.embedding,
        gives=not stage.head,
        deferred=deferred,
        kernels=kernels,
        cublas=any(link.cublas for link in row),
    )


def _shared(s: Sizes, stage: Stage, recompute: RecomputeChoice) -> dict[str, int]:
    """Return what autograd saves of a microbatch's context, which layers alone read.

    Rerunning whole layers needs all of it.
    """
    if not stage.layers:
        return {}
    return {"rotary": s.rotary, **({"mask": s.mask} if recompute.whole_layers else {})}


def _row(s: Sizes, stage: Stage, recompute: RecomputeChoice) -> list[_Link]:
    captured = captured_phases(s.run.cuda_graph)
    parts = stage_parts(s.model, stage, s.run.precision.fp8)
    links = {
        part: _link(part_trace(s, part, recompute), captured if part.is_layer else ())
        for part in set(parts)
    }
    return [links[part] for part in parts]


def _link(traced: ForwardTrace, captured: Collection[str]) -> _Link:
    return _Link(
        trace_memory(traced),
        captured_memory(traced, captured),
        captured,
        kernels=traced.kernels(),
        cublas=traced.cublas(),
    )


def _memory(
    s: Sizes, row: Sequence[_Link], carried: int, shared: Mapping[str, int]
) -> MicrobatchMemory:
    """Sum up the memory of a row of traces.

    carried: gradient of a tied embedding, alive from the head's backward to the embedding's.
    shared: what autograd saves of the microbatch's context; captured attention reads a static copy
    instead, so the original is freed after forward.
    """
    captured = {phase for link in row for phase in link.captured}
    context = s.rotary + s.mask if captured else 0
    copied = "attn" in captured
    shared = {} if copied else shared
    kept = dict(shared)
    passing = s.mask + s.rotary - sum(shared.values())  # alive until the end of forward
    for link in row:
        for phase, size in link.memory.kept.items():
            kept[phase] = kept.get(phase, 0) + size - link.graph.kept.get(phase, 0)
    total = sum(kept.values())
    stands_on = sum(shared.values())
    forward = backward = 0
    waiting = queued = sum(link.memory.waiting for link in row)
    for place, link in enumerate(row):
        forward = max(forward, stands_on + link.peak(link.memory.forward) - total)
        queued -= link.memory.waiting  # left: of traces whose backward comes before this one's
        waits = queued + (carried if place < len(row) - 1 else 0)
        backward = max(backward, stands_on + link.peak(link.memory.backward) + waits - total)
        stands_on += link.kept
    return MicrobatchMemory(
        kept, forward + passing, backward, waiting=waiting, graph=_graph_share(row, context)
    )


def _graph_share(row: Sequence[_Link], context: int) -> GraphShare:
    return GraphShare(
        kept=sum(link.graph.own for link in row),
        cut=sum(link.graph.cut for link in row),
        gradients={link.inside: link.graph.gradients for link in row if link.inside},
        context=context,
        scratch=max((link.scratch() for link in row), default=0),
        kernels=sum(
            count for link in row for phase, count in link.kernels.items() if phase in link.captured
        ),
        cublas=any(not link.cublas.isdisjoint(link.captured) for link in row),
    )
