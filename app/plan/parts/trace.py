"""Operation lists: what each part of the model reads, saves, computes and sends, in numbers.

A part is described once, as the list of operations of its forward on one rank for one microbatch.
Saved activations, peaks, floating-point operations, bytes sent, launches and seconds are sums over
that list. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod

from app.choices import Dtype, Fp8Recipe, Recompute, ScheduleName
from app.config import ModelConfig, Run
from app.plan.groups import TP, Group, Way
from app.plan.layout import ParallelLayout
from app.plan.model.held import is_held, restored_bytes
from app.plan.model.weight import Weight
from app.plan.parts.fp8 import Fp8Work
from app.plan.parts.known import KnownSizes
from app.plan.recompute import NOTHING, RecomputeChoice, RecomputePolicy
from app.plan.sharding.blocks import ShardCoords

# forward and backward of an operation whose kernels read and write each of its tensors once
ONCE = 1.0, 1.0
BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}


class Work(Enum):
    """Kind of work of an operation's kernels; each kind has speeds of its own."""

    gemm = "GEMMs"
    router_matmul = "router GEMM"  # accumulated in float32
    grouped = "grouped GEMMs"
    attention = "attention"
    ordered_attention = "ordered attention"  # torch's slower, deterministic kernel
    # the same kernel, not deterministic: queries that are the last of more keys, and documents
    gathered_attention = "attention to gathered keys"
    cudnn_ordered_attention = "ordered attention of cuDNN"  # deterministic gradients
    capped_attention = "attention with capped scores"  # by GEMMs and passes over scores
    linear_attention = "linear attention"
    activation = "activation"
    heads = "heads"
    norm = "norms"
    loss = "loss"
    rows = "rows of experts"
    other = "other kernels"


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
    work: Work
    reads: int  # inputs that have a gradient
    makes: int  # outputs
    saves: int  # kept from forward to backward; a tensor of several readers counts at the first
    restores: int  # kept from its rerun to its backward
    part: int | None  # number of the rerun part that it belongs to; None: none
    rerun: bool  # backward runs its forward again
    weight: int  # its parameter, and the gradient of that if it is trained
    stored: bool  # that gradient is stored before it is added to the main gradient
    waits: int  # what a split backward keeps for the weight gradient
    deferred: int  # memory of that gradient in the second part of a split backward
    scratch: tuple[int, int]  # alive only while it runs, forward and backward
    passes: bool  # the input's gradient is the output's gradient, not a new tensor
    kernels: int  # kernel launches of its forward
    # FLOPs of its forward, 2·m·n·k per GEMM; its backward has twice as many, half of them for its
    # weight gradient if it has one
    flops: int
    flops_recomputed: int  # FLOPs that its own backward recomputes
    fp8: Fp8Work | None  # None: its GEMMs are in the type of parameters
    sends: Sends | None  # None: nothing
    used: float  # share of its rows that hold a token; kernels skip the others
    window: int | None = None  # most keys that a query sees; None: all before it
    summed: bool = False  # added to the residual stream, whose gradient is its output's
    trained: bool = True  # its parameter, if any, has a gradient
    # how often its kernels pass over what it reads and makes, forward and backward, at the speed of
    # those that read and write in order: more than once if it is many kernels
    moves: tuple[float, float] = ONCE
    reached: bool = True  # backward reaches it: a parameter at or before it is trained

    @property
    def working(self) -> int:
        """Gradients and buffers that are alive while its backward runs."""
        if not self.reached:
            return 0
        gradients = 0 if self.passes else self.reads + (0 if self.summed else self.makes)
        return gradients + self.stored * self.weight + self.scratch[1]


def forward_only(op: Operation) -> Operation:
    """Return the operation where backward does not reach it."""
    return replace(
        op,
        saves=0,
        restores=0,
        rerun=False,
        waits=0,
        deferred=0,
        scratch=(op.scratch[0] + op.reads, 0),  # its input is there while it runs
        flops_recomputed=0,
        sends=op.sends and replace(op.sends, backward=0),
        reached=False,
    )


def splits_backward(run: Run) -> bool:
    """Return whether the schedule splits backward and defers weight gradients."""
    return run.schedule.name in (ScheduleName.zero_bubble_h1, ScheduleName.zero_bubble_v)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the descriptions of a run's parts share, of one microbatch on one rank."""

    run: Run
    layout: ParallelLayout
    coords: ShardCoords  # of any rank: weights have equal shapes on all
    recompute: RecomputePolicy
    load: float  # rows of this rank's experts over the mean of their expert-parallel group
    # FP8 recipe of linear layers in the described part; None: 16 bits
    in_fp8: Fp8Recipe | None = None
    experts_in_fp8: bool = False
    # operations shared with plans of other runs; None: none are
    known: KnownSizes | None = field(default=None, compare=False, repr=False)

    @property
    def model(self) -> ModelConfig:
        """The run's model."""
        return self.run.model

    @property
    def size(self) -> int:
        """Bytes of an element of parameters and activations."""
        return BYTES[self.run.precision.params]

    @property
    def tokens(self) -> int:
        """T: tokens of a microbatch on a context-parallel rank."""
        return self.run.train.micro_batch * self.run.train.seq_len // self.layout.cp

    @property
    def local(self) -> int:
        """T / tp: tokens outside of attention and feed-forward (sequence parallelism)."""
        return self.tokens // self.layout.tp

    @property
    def heads(self) -> int:
        """N: query heads of this rank."""
        return self.model.num_heads // self.layout.tp

    @property
    def kv_heads(self) -> int:
        """G: key and value heads of this rank."""
        return self.model.num_kv_heads // self.layout.tp

    @property
    def stream(self) -> int:
        """Residual stream: T/tp × D."""
        return self.local * self.model.hidden_size * self.size

    @property
    def rotary(self) -> int:
        """Cosines and sines that layers of a microbatch share, fp32: 2 × T × rotated width."""
        return 2 * 4 * self.tokens * self.model.rope.width

    @property
    def splits(self) -> bool:
        """True if the schedule splits backward and defers weight gradients."""
        return splits_backward(self.run)

    @property
    def fused(self) -> bool:
        """True if GEMMs accumulate weight gradients directly into wider main gradients."""
        return BYTES[self.run.precision.grads] > self.size

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of this rank's part of a weight."""
        return self.coords.shape(weight)

    def weight(self, weight: Weight) -> int:
        """Return the bytes of this rank's part of a weight."""
        return prod(self.shape(weight)) * self.size

    def restored(self, weight: Weight) -> int:
        """Return the bytes of a weight while it is dequantised; 0 if it is held as it is."""
        base = self.run.lora.base
        if base is None or not is_held(weight):
            return 0
        return restored_bytes(base, prod(self.shape(weight)), self.size)

    def tp_sends(self, own: int, forward: int, backward: int) -> Sends | None:
        """Return sends of so many ring all-gathers or reduce-scatters over tp; None without tp.

        own: bytes of a rank's own tokens.
        """
        each = (self.layout.tp - 1) * own
        return Sends(TP, Way.ring, forward * each, backward * each) if each else None


@dataclass(slots=True)
class Trace:
    """The operations of a part while they are listed."""

    sizes: Sizes
    recompute: RecomputeChoice = NOTHING  # what backward recomputes
    phase: str = ""  # of the next operations
    ops: list[Operation] = field(default_factory=list)
    parts: int = 0  # rerun parts begun so far
    _part: int | None = None  # the open one
    _input: int = 0  # its input, which stays for the rerun

    def op(
        self,
        work: Work,
        reads: int,
        makes: int,
        saves: int = 0,
        *,
        restores: int = 0,
        rerun: bool = False,
        weight: int = 0,
        stored: bool = False,
        waits: int = 0,
        deferred: int = 0,
        scratch: tuple[int, int] = (0, 0),
        passes: bool = False,
        kernels: int = 1,
        flops: int = 0,
        flops_recomputed: int = 0,
        fp8: Fp8Work | None = None,
        sends: Sends | None = None,
        used: float = 1.0,
        window: int | None = None,
        trained: bool = True,
        moves: tuple[float, float] = ONCE,
    ) -> int:
        """Add an operation; return the bytes that it makes.

        saves: what stays for backward, of inputs and outputs not counted before. restores: what is
        saved elsewhere, and copied back for its backward alone. The rest is as in `Operation`;
        what stays or waits for a weight gradient counts only if the parameter is trained.
        """
        inside = self.open
        split = trained and self.sizes.splits
        if not trained:  # nothing keeps its input, which is still there while it runs
            scratch = scratch[0] + reads, scratch[1]
        if restores and not inside:
            self.parts += 1
        self.ops.append(
            Operation(
                self.phase,
                work,
                reads,
                makes,
                saves=self._input if inside else saves,
                restores=restores + (saves if inside else 0),
                part=self._part if inside or not restores else self.parts,
                rerun=rerun or inside,
                weight=weight,
                stored=stored and trained,
                waits=waits if split else 0,
                deferred=deferred if split else 0,
                scratch=scratch,
                passes=passes,
                kernels=kernels,
                flops=flops,
                flops_recomputed=flops_recomputed,
                fp8=fp8,
                sends=sends,
                used=used,
                window=window,
                trained=trained,
                moves=moves,
            )
        )
        self._input = 0
        return makes

    def add(self, size: int) -> int:
        """Add the sum of the residual stream and the output of the last operation."""
        if self.sizes.model.residual_factor != 1:  # the output has a gradient of its own
            return self.op(Work.other, 2 * size, size)
        self.ops[-1] = replace(self.ops[-1], summed=True)
        return self.op(Work.other, 2 * size, size, passes=True)

    def reruns(self, part: Recompute) -> bool:
        """Return whether backward recomputes a part of a layer."""
        return part in self.recompute.parts

    @property
    def open(self) -> bool:
        """True inside operations that backward reruns."""
        return self._part is not None

    @contextmanager
    def in_16_bits(self) -> Iterator[None]:
        """List operations of matrices that never run in FP8."""
        sizes = self.sizes
        self.sizes = replace(sizes, in_fp8=None)
        yield
        self.sizes = sizes

    @contextmanager
    def rerun(self, chosen: bool, keeps: int) -> Iterator[None]:
        """Begin operations that backward reruns from an input of `keeps` bytes, if `chosen`.

        No effect inside a larger part that is rerun.
        """
        begins = chosen and self._part is None
        if begins:
            self.parts += 1
            self._part, self._input = self.parts, keeps
        yield
        if begins:
            self._part = None


@dataclass(frozen=True, slots=True)
class TraceMemory:
    """Memory of a part of a stage; the peaks include everything that it saves."""

    kept: dict[str, int]  # phase -> saved from forward to backward
    forward: int  # most that is alive in its forward
    backward: int  # most that is alive in its backward
    waiting: int  # kept for weight gradients between the two parts of a split backward
    offloaded: dict[str, int]  # phase -> of those kept, bytes in host memory


def offloaded(ops: Collection[Operation], choice: RecomputeChoice) -> dict[str, int]:
    """Return phase -> bytes that a layer's operations keep in host memory."""
    found: dict[str, int] = {}
    if choice.offload:
        for op in ops:
            if op.fp8 is None and choice.offloads(op.phase, op.saves):
                found[op.phase] = found.get(op.phase, 0) + op.saves
    return found


def trace_memory(
    ops: Collection[Operation], beside: int, choice: RecomputeChoice = NOTHING
) -> TraceMemory:
    """Return the memory of operations beside which a tensor of these bytes stays: the residual.

    Backward goes through the list from its end, so an operation has what those before it saved, and
    with a split backward what those behind it wait for. What a rerun restores is alive from its
    last operation to its first; in forward, until its phase ends.
    """
    kept: dict[str, int] = {}
    waiting = waits = sum(op.waits for op in ops)
    forward = backward = saved = restored = inside = 0
    part, phase = None, ""
    for op in ops:
        restored = restored * (op.part == part) + op.restores
        inside = inside * (op.phase == phase) + op.restores
        part, phase = op.part, op.phase
        forward = max(forward, saved + op.makes + op.scratch[0] + (inside or beside))
        saved += op.saves
        waits -= op.waits
        backward = max(backward, saved + restored + waits + op.working + beside)
        if op.saves:
            kept[op.phase] = kept.get(op.phase, 0) + op.saves
    away = offloaded(ops, choice)
    return TraceMemory(kept, max(forward, saved), backward, waiting, offloaded=away)
