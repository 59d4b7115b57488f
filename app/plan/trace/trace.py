"""A forward as a list of operations on sizes: what each reads, makes, saves for backward, computes.

`app.plan.trace.lifetimes` finds out what autograd keeps of it and what else is alive while it runs;
floating-point operations (`app.plan.cost.flops`), bytes sent to other ranks for it
(`app.plan.cost.volumes`) and launches are sums over it. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import Enum

from app.choices import Recompute
from app.plan.groups import Group, Way
from app.plan.recompute import NOTHING, RecomputeChoice
from app.plan.trace.fp8 import Fp8Work


@dataclass(frozen=True, slots=True, eq=False)
class TracedTensor:
    """A tensor, equal only to itself."""

    bytes: int  # of its elements
    storage: int  # number of the memory it lies in, which views share


class GradAddition(Enum):
    """How a backward adds the gradient of a weight to its sum."""

    after = "after"  # the gradients of what it reads have been made: they are there together
    inside = "inside"  # of the product that makes it: it is never there


class Work(Enum):
    """What an operation's kernels spend their time on: each kind has speeds of its own."""

    gemm = "products"
    router_matmul = "router's products"  # summed in float32
    grouped = "experts' products"
    attention = "attention"
    ordered_attention = "ordered attention"  # by the slower kernel that sums in a fixed order
    gathered_attention = "attention to gathered keys"  # by the same kernel, in no fixed order
    cudnn_ordered_attention = "ordered attention of cuDNN"  # gradients in a fixed order
    activation = "activation"
    heads = "heads"
    norm = "norms"
    loss = "loss"
    rows = "rows of experts"
    other = "other kernels"


@dataclass(frozen=True, slots=True)
class Segment:
    """Operations that backward runs again, so that what they make need not be kept."""

    number: int
    discards: bool  # also what operations behind it have saved of it


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
    reads: tuple[TracedTensor, ...]  # that have a gradient
    makes: tuple[TracedTensor, ...]
    new: tuple[int, ...]  # storages that it makes: its values that are no views
    saves: tuple[TracedTensor, ...]  # for its backward
    holds: tuple[TracedTensor, ...]  # alive until here for other reasons
    keeps: int  # saved besides: statistics that only its backward reads
    weight: int  # gradient of its parameter
    added: GradAddition  # that gradient to its sum
    # what that gradient takes in the second part of a split backward; None: it does not wait
    deferred: int | None
    waits: bool  # whether what it is made of is there until then, and not kept elsewhere
    # a copy of the gradient of what it makes, which waits in place of that; None: itself does
    waiting: int | None
    carries: int  # what a split backward holds of it besides until its second part
    scratch: tuple[int, int]  # alive only while it runs, forward and backward
    passes: bool  # the gradient of what it reads is that of what it makes, not a new tensor
    kernels: int  # launches of its forward
    # floating-point operations of its forward's products, 2·m·n·k each; its backward has twice as
    # many, half of them for the gradient of its weight if it has one
    flops: int
    flops_recomputed: int  # of these, what its own backward computes again
    fp8: Fp8Work | None  # None: its products are in the type of parameters
    sends: Sends | None  # None: nothing
    work: Work
    used: float  # share of its rows that are somebody's: kernels leave out the others


@dataclass(slots=True)
class Trace:
    """The trace of a forward while it is being recorded."""

    recompute: RecomputeChoice = NOTHING  # what backward runs again
    ops: list[Operation] = field(default_factory=list)
    storages: list[int] = field(default_factory=list)  # bytes of each
    # those that are kept elsewhere, in fewer bytes, and copied back for backward
    paged: set[int] = field(default_factory=set)
    phase: str = ""  # of the next operations
    segment: Segment | None = None  # of the next operations
    segments: int = 0  # begun so far

    def value(self, size: int) -> TracedTensor:
        """A tensor with memory of its own."""
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
        """Write down an operation; returns what it makes.

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
        """Parts of a tensor as views; backward puts their gradients together in a new tensor."""
        return self.op([of], [TracedTensor(size, of.storage) for size in sizes], kernels=0)

    def add(
        self, left: TracedTensor, right: TracedTensor, holds: Sequence[TracedTensor] = ()
    ) -> TracedTensor:
        """Their sum, of the size of the left one."""
        return self.op([left, right], [left.bytes], holds=holds, passes=True)[0]

    def whole_layer(self) -> AbstractContextManager[bool]:
        """A block with all of a layer, which backward runs again where it recomputes whole ones."""
        return self._segment(self.recompute.whole_layers, discards=False)

    def recomputed(
        self, part: Recompute | None, discards: bool = False
    ) -> AbstractContextManager[bool]:
        """A block that backward runs again where it recomputes `part` of a layer; None: never.

        Yields whether it does so for this block: not inside of a larger one that it runs again.
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
    """A finished trace, with what comes in and what goes on."""

    trace: Trace
    given: TracedTensor  # what comes in
    result: TracedTensor | None  # what goes on; None: a loss, which is summed up

    def kernels(self) -> dict[str, int]:
        """Phase -> launches of its forward."""
        found: dict[str, int] = {}
        for op in self.trace.ops:
            found[op.phase] = found.get(op.phase, 0) + op.kernels
        return found

    def cublas(self) -> set[str]:
        """Phases with products by cuBLAS: not of experts, and not in FP8."""
        by_it = (Work.gemm, Work.router_matmul)
        return {op.phase for op in self.trace.ops if op.work in by_it and op.fp8 is None}
