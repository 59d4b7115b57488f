"""Trace of a forward: a list of operations on sizes: reads, outputs, saved tensors, FLOPs.

`app.plan.parts.lifetimes` derives what autograd saves and what is alive. Floating-point operations
(`app.plan.cost.flops`), bytes sent to other ranks (`app.plan.cost.volumes`) and launches are sums
over it. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum

from app.choices import Recompute
from app.plan.groups import Group, Way
from app.plan.parts.fp8 import Fp8Work
from app.plan.recompute import NOTHING, RecomputeChoice


@dataclass(frozen=True, slots=True, eq=False)
class TracedTensor:
    """A tensor, equal only to itself."""

    bytes: int  # of its elements
    storage: int  # number of its storage, which views share


class GradAddition(Enum):
    """Accumulation of a weight gradient into the main gradient."""

    after = "after"  # in a kernel of its own: the gradient coexists with those of the inputs
    inside = "inside"  # inside the GEMM: the gradient is never stored


class Work(Enum):
    """Kind of work of an operation's kernels; each kind has speeds of its own."""

    gemm = "GEMMs"
    router_matmul = "router GEMM"  # accumulated in float32
    grouped = "grouped GEMMs"
    attention = "attention"
    ordered_attention = "ordered attention"  # torch's slower, deterministic kernel
    gathered_attention = "attention to gathered keys"  # the same kernel, not deterministic
    cudnn_ordered_attention = "ordered attention of cuDNN"  # deterministic gradients
    activation = "activation"
    heads = "heads"
    norm = "norms"
    loss = "loss"
    rows = "rows of experts"
    other = "other kernels"


@dataclass(frozen=True, slots=True)
class Segment:
    """Operations that backward reruns, so that their outputs need not be saved."""

    number: int
    discards: bool  # also outputs that operations after the segment have saved


@dataclass(frozen=True, slots=True)
class Sends:
    """Bytes that an operation sends from this rank to others of its group."""

    group: Group
    way: Way
    forward: int
    backward: int


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a forward, and what its backward needs; sizes in bytes."""

    phase: str
    segment: Segment | None
    reads: tuple[TracedTensor, ...]  # inputs that have a gradient
    makes: tuple[TracedTensor, ...]  # outputs
    new: tuple[int, ...]  # storages that it allocates: those of its outputs that are no views
    saves: tuple[TracedTensor, ...]  # for its backward
    holds: tuple[TracedTensor, ...]  # kept alive until here for other reasons
    keeps: int  # bytes of statistics saved for its backward alone
    weight: int  # bytes of its parameter's gradient
    added: GradAddition  # how that gradient is accumulated
    # memory of that gradient in the second part of a split backward; None: it is not deferred
    deferred: int | None
    waits: bool  # the inputs of a deferred gradient are alive until then, and not kept elsewhere
    # bytes of an FP8 copy of the output gradient that waits in its place; None: no copy
    waiting: int | None
    carries: int  # bytes that a split backward holds besides until its second part
    scratch: tuple[int, int]  # alive only while it runs, forward and backward
    passes: bool  # the input's gradient is the output's gradient, not a new tensor
    kernels: int  # kernel launches of its forward
    # FLOPs of its forward, 2·m·n·k per GEMM; its backward has twice as many, half of them for its
    # weight gradient if it has one
    flops: int
    flops_recomputed: int  # FLOPs that its own backward recomputes
    fp8: Fp8Work | None  # None: its GEMMs are in the type of parameters
    sends: Sends | None  # None: nothing
    work: Work
    used: float  # share of its rows that hold a token; kernels skip the others


@dataclass(slots=True)
class Trace:
    """The trace of a forward while it is recorded."""

    recompute: RecomputeChoice = NOTHING  # what backward recomputes
    ops: list[Operation] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)  # bytes of each
    # storages that are saved elsewhere, in fewer bytes, and copied back for backward
    paged: set[int] = field(default_factory=set)
    phase: str = ""  # of the next operations
    segment: Segment | None = None  # of the next operations
    segments: int = 0  # segments begun so far

    def value(self, size: int) -> TracedTensor:
        """Allocate a tensor with a storage of its own."""
        self.storages.append(size)
        return TracedTensor(size, len(self.storages) - 1)

    def op(
        self,
        reads: Sequence[TracedTensor],
        makes: Sequence[int | TracedTensor],
        saves: Sequence[int | TracedTensor] = (),
        *,
        holds: Sequence[TracedTensor] = (),
        keeps: int = 0,
        weight: int = 0,
        added: GradAddition = GradAddition.after,
        deferred: int | None = None,
        waits: bool = True,
        waiting: int | None = None,
        carries: int = 0,
        scratch: tuple[int, int] = (0, 0),
        passes: bool = False,
        kernels: int = 1,
        flops: int = 0,
        flops_recomputed: int = 0,
        fp8: Fp8Work | None = None,
        sends: Sends | None = None,
        work: Work = Work.other,
        used: float = 1.0,
    ) -> tuple[TracedTensor, ...]:
        """Record an operation; return its outputs.

        `makes`: the size of each new tensor, or a view of another one. `saves`: tensors, or indices
        into `makes`. The rest is as in `Operation`.
        """
        before = len(self.storages)
        made = tuple(self.value(item) if isinstance(item, int) else item for item in makes)
        saved = tuple(made[item] if isinstance(item, int) else item for item in saves)
        op = Operation(
            self.phase,
            self.segment,
            tuple(reads),
            makes=made,
            new=tuple(range(before, len(self.storages))),
            saves=saved,
            holds=tuple(holds),
            keeps=keeps,
            weight=weight,
            added=added,
            deferred=deferred,
            waits=waits and deferred is not None,
            waiting=waiting,
            carries=carries,
            scratch=scratch,
            passes=passes,
            kernels=kernels,
            flops=flops,
            flops_recomputed=flops_recomputed,
            fp8=fp8,
            sends=sends,
            work=work,
            used=used,
        )
        self.ops.append(op)
        return made

    def split(self, of: TracedTensor, *sizes: int) -> tuple[TracedTensor, ...]:
        """Record views of parts of a tensor.

        Backward concatenates their gradients in a new tensor.
        """
        return self.op([of], [TracedTensor(size, of.storage) for size in sizes], kernels=0)

    def add(
        self, left: TracedTensor, right: TracedTensor, holds: Sequence[TracedTensor] = ()
    ) -> TracedTensor:
        """Record a sum, of the size of the left tensor."""
        return self.op([left, right], [left.bytes], holds=holds, passes=True)[0]

    def whole_layer(self) -> AbstractContextManager[bool]:
        """Begin a block with a whole layer, which backward reruns under full recomputation."""
        return self._segment(self.recompute.whole_layers, discards=False)

    def recomputed(
        self, part: Recompute | None, discards: bool = False
    ) -> AbstractContextManager[bool]:
        """Begin a block that backward reruns if it recomputes `part` of a layer; None: never.

        Yields whether it is rerun by itself: False inside a larger block that is rerun.
        """
        return self._segment(part in self.recompute.parts, discards)

    @contextmanager
    def _segment(self, chosen: bool, discards: bool) -> Iterator[bool]:
        outer = self.segment
        begins = chosen and outer is None
        if begins:
            self.segment = Segment(self.segments, discards)
            self.segments = self.segments + 1
        yield begins
        self.segment = outer


@dataclass(frozen=True, slots=True)
class ForwardTrace:
    """A finished trace, with its input and its output."""

    trace: Trace
    given: TracedTensor  # input
    result: TracedTensor | None  # output; None: a loss

    def kernels(self) -> dict[str, int]:
        """Return phase -> kernel launches of its forward."""
        found: dict[str, int] = {}
        for op in self.trace.ops:
            found[op.phase] = found.get(op.phase, 0) + op.kernels
        return found

    def cublas(self) -> set[str]:
        """Return the phases with GEMMs by cuBLAS: not of experts, and not in FP8."""
        by_it = (Work.gemm, Work.router_matmul)
        return {op.phase for op in self.trace.ops if op.work in by_it and op.fp8 is None}
