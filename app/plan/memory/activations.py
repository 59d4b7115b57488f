"""Activations of one microbatch in one stage, on one rank: what autograd keeps, and what else is
alive while it computes.

A stage is a row of traces: embedding, layers, head. Forward adds what each keeps and backward takes
it away from the other end, so the peak of a trace stands on what the traces before it keep. All
numbers are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field

from app.choices import GraphScope
from app.config import CudaGraphConfig, Run
from app.plan.layout import ParallelLayout
from app.plan.model.phases import PhaseName
from app.plan.model.vocabulary import table
from app.plan.recompute import RecomputeChoice
from app.plan.stages import Stage
from app.plan.trace.lifetimes import (
    CapturedMemory,
    TraceMemory,
    captured_memory,
    trace_memory,
)
from app.plan.trace.parts import Sizes, sizes_of
from app.plan.trace.stage import StagePart, part_trace, stage_parts
from app.plan.trace.trace import ForwardTrace

ROUTER = (PhaseName.norm, PhaseName.shared, PhaseName.route)
EXPERTS = (PhaseName.dispatch, PhaseName.experts, PhaseName.combine, PhaseName.finish)
# phases of layers
DENSE = (PhaseName.attn, PhaseName.mlp)
MOE = (PhaseName.attn, *ROUTER, PhaseName.preprocess, *EXPERTS)
CAPTURED = {
    GraphScope.attn: (PhaseName.attn,),
    GraphScope.mlp: (PhaseName.mlp,),
    GraphScope.moe_router: ROUTER,
    GraphScope.moe_preprocess: (PhaseName.preprocess,),
    GraphScope.moe: (*ROUTER, PhaseName.preprocess, *EXPERTS),
}  # part of a layer -> the phases of it that a graph holds


@dataclass(frozen=True, slots=True)
class GraphShare:
    """What a microbatch's partial graphs hold besides inputs of captured parts; 0 without them."""

    kept: int  # by autograd, for their own backward alone
    cut: int  # made inside and read outside
    gradients: Mapping[tuple[str, ...], int]  # captured phases of a layer -> of what they hand on
    context: int  # what the layers share: cosines, sines, the mask
    scratch: int  # alive only while one of them runs
    kernels: int  # launches of all their forwards
    cublas: bool  # whether any of them has products by cuBLAS


@dataclass(frozen=True, slots=True)
class MicrobatchMemory:
    """Memory of a microbatch from its forward to its backward, outside of partial graphs."""

    kept: Mapping[str, int]  # phase -> what autograd keeps
    forward: int  # most that is alive in forward beyond what is kept in the end
    backward: int  # most that is alive in backward beyond what was kept at its start
    waiting: int  # what gradients of weights need between the two parts of a split backward
    graph: GraphShare
    total: int = field(init=False)  # all that autograd keeps
    pool: int = field(init=False)  # what its partial graphs hold until their backward

    def __post_init__(self) -> None:
        # Sums that a walk along a schedule asks for tens of thousands of times.
        object.__setattr__(self, "total", sum(self.kept.values()))
        object.__setattr__(self, "pool", self.graph.kept + self.graph.cut)


@dataclass(frozen=True, slots=True)
class ChunkActivations:
    """Memory of the microbatches of one chunk."""

    usual: MicrobatchMemory  # as most are recomputed
    spared: MicrobatchMemory  # as those that keep more (`RecomputePolicy.spared`)
    border: int  # hidden states that a stage takes in or gives on; their gradients are as large
    takes: bool  # whether hidden states come in; otherwise tokens
    gives: bool  # whether hidden states go on; otherwise the loss ends here
    deferred: int  # most that a gradient takes in the second part of a split backward
    grouped: int  # what gradients of experts' weights of one microbatch are made of
    kernels: int  # launches of a forward
    cublas: bool  # whether any of its products is by cuBLAS


@dataclass(frozen=True, slots=True)
class _Link:
    """The memory of one trace of the row: what a partial graph of it holds, and the rest."""

    memory: TraceMemory
    graph: CapturedMemory
    captured: Collection[str]  # phases that the graph holds
    kernels: Mapping[str, int]  # phase -> launches
    cublas: Set[str]  # phases with products by cuBLAS

    @property
    def inside(self) -> tuple[str, ...]:
        """Phases of this trace that the graph holds."""
        return tuple(phase for phase in self.kernels if phase in self.captured)

    @property
    def kept(self) -> int:
        """What autograd keeps outside of the graph."""
        return self.memory.total - self.graph.total

    def peak(self, alive: Mapping[str, int]) -> int:
        """Most that is alive in the other phases, without what the graph keeps."""
        others = (size for phase, size in alive.items() if phase not in self.captured)
        return max(others, default=self.graph.total) - self.graph.total

    def scratch(self) -> int:
        """Most that is alive in the graph beyond what it leaves behind."""
        both = (*self.memory.forward.items(), *self.memory.backward.items())
        mine = (size for phase, size in both if phase in self.captured)
        return max(mine, default=self.graph.total) - self.graph.total


def chunk_activations(run: Run, stage: Stage, layout: ParallelLayout) -> ChunkActivations:
    """Memory of one microbatch in a stage on one rank, at the planned imbalance of its experts."""
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
        grouped=sum(link.memory.grouped for link in row),
        kernels=kernels,
        cublas=any(link.cublas for link in row),
    )


def captured_phases(choice: CudaGraphConfig) -> frozenset[str]:
    """Phases of layers that partial graphs hold."""
    if not choice.of_parts:
        return frozenset()
    if not choice.scope:
        return frozenset((*DENSE, *MOE))
    return frozenset(phase for part in choice.scope for phase in CAPTURED[part])


def own_inputs(run: Run, layers: Sequence[int]) -> tuple[int, ...]:
    """Places among these layers whose captured part does not go on where that of the layer
    before it has ended.
    """
    captured = captured_phases(run.cuda_graph)
    own = list[int]()
    ended = False
    for place, layer in enumerate(layers):
        phases = MOE if run.model.is_moe_layer(layer) else DENSE
        if not (captured.isdisjoint(phases) or (ended and phases[0] in captured)):
            own.append(place)
        ended = phases[-1] in captured
    return tuple(own)


def _shared(s: Sizes, stage: Stage, recompute: RecomputeChoice) -> dict[str, int]:
    """What autograd keeps of a microbatch's context: layers alone read it, and whole ones are
    called again with all of it.
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
    """`carried`: gradient of a tied table, from the head's backward to that of the embedding.

    `shared`: what autograd keeps of the microbatch's context. Captured attention reads it in static
    memory; then it is gone after forward.
    """
    captured = {phase for link in row for phase in link.captured}
    context = s.rotary + s.mask if captured else 0
    copied = "attn" in captured
    shared = {} if copied else shared
    kept = dict(shared)
    passing = s.mask + s.rotary - sum(shared.values())  # what is there until forward has ended
    for link in row:
        for phase, size in link.memory.kept.items():
            kept[phase] = kept.get(phase, 0) + size - link.graph.kept.get(phase, 0)
    total = sum(kept.values())
    stands_on = sum(shared.values())
    forward = backward = 0
    waiting = queued = sum(link.memory.waiting for link in row)
    for place, link in enumerate(row):
        forward = max(forward, stands_on + link.peak(link.memory.forward) - total)
        queued -= link.memory.waiting  # left: of those whose backward comes before this one's
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
