"""Common parts of traces: sizes of a run, and the operations that layers consist of.

With tp > 1 the residual stream, norms, router and dispatch have 1/tp of the tokens (sequence
parallelism, Korthikanti et al. 2022); attention and feed-forward see all of them in 1/tp of the
width. A column-parallel linear layer all-gathers the tokens first, saves only its own part of them,
and gathers again in backward for its weight gradient. Gathered parts of several sequences are
copied once more, into the order of the tokens. Sizes of weights and of GEMM outputs come from
`app.plan.model` alone. All sizes are bytes.

Shapes: T tokens of a microbatch on a context-parallel rank · D hidden · N query and G key/value
heads of width H, F hidden width of a feed-forward, all of them this rank's · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from app.choices import CpComm, Dtype, Fp8Recipe, Recompute, ScheduleName
from app.config import ModelConfig, Run
from app.kernels.tiling import norm_tiling
from app.plan.groups import TP, Way
from app.plan.layout import ParallelLayout
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Weight
from app.plan.parts.dispatcher import busiest_load
from app.plan.parts.fp8 import GemmOperands
from app.plan.parts.trace import GradAddition, Sends, Trace, TracedTensor, Work
from app.plan.recompute import RecomputePolicy, recompute_policy
from app.plan.sharding.blocks import ShardCoords

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}
RMS_STATISTICS = 4  # per row, fp32: what RMSNorm saves besides its input


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that the traces of a run share: bytes, of one microbatch on one rank."""

    run: Run
    layout: ParallelLayout
    coords: ShardCoords  # of any rank: weights have equal shapes on all
    size: int  # bytes of an element of parameters and activations
    tokens: int  # T
    local: int  # T / tp: tokens outside of attention and feed-forward
    heads: int  # N
    kv_heads: int  # G
    recompute: RecomputePolicy
    load: float  # rows of this rank's experts over the mean of their expert-parallel group
    # FP8 recipe of linear layers in the traced part; None: 16 bits
    in_fp8: Fp8Recipe | None = None
    experts_in_fp8: bool = False  # experts run in FP8

    @property
    def model(self) -> ModelConfig:
        """The run's model."""
        return self.run.model

    @property
    def stream(self) -> int:
        """Residual stream: T/tp × D."""
        return self.local * self.model.hidden_size * self.size

    @property
    def rotary(self) -> int:
        """Cosines and sines that all layers of a microbatch share, fp32: 2 × T × rotated width."""
        return 2 * 4 * self.tokens * self.model.rope.width

    @property
    def mask(self) -> int:
        """Document mask, if there is one: a byte per query and token of its sequence."""
        cut = self.layout.cp if self.run.parallel.cp_comm_type is CpComm.all_gather else 1
        if not self.run.data.document_mask:
            return 0
        return self.tokens * self.layout.cp // cut * self.run.train.seq_len

    @property
    def copies(self) -> int:
        """Copies of gathered tokens that are alive while they are reordered: 1 or 2."""
        return min(self.run.train.micro_batch, 2)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Return the shape of this rank's part of a weight."""
        return self.coords.shape(weight)

    def weight(self, weight: Weight) -> int:
        """Return the bytes of this rank's part of a weight."""
        return prod(self.shape(weight)) * self.size

    @property
    def splits(self) -> bool:
        """True if the schedule splits backward and defers weight gradients."""
        return self.run.schedule.name in (ScheduleName.zero_bubble_h1, ScheduleName.zero_bubble_v)

    @property
    def fused(self) -> bool:
        """True if GEMMs accumulate weight gradients directly into wider main gradients."""
        return BYTES[self.run.precision.grads] > self.size

    @property
    def direct(self) -> bool:
        """True if backward does that at once."""
        return self.fused and not self.splits

    @property
    def added(self) -> GradAddition:
        """How backward accumulates weight gradients."""
        return GradAddition.inside if self.direct or self.splits else GradAddition.after

    def deferred(self, weight: int, gathered: int = 0) -> int | None:
        """Return the memory of a deferred weight gradient while it is computed.

        None if none is deferred. That is what is gathered for it, and the gradient itself unless it
        is accumulated in the GEMM.
        """
        return gathered + (0 if self.fused else weight) if self.splits else None


def sizes_of(run: Run, layout: ParallelLayout, load: float | None = None) -> Sizes:
    """Return the sizes of one microbatch on one rank; `load` None is that of the busiest rank."""
    tokens = run.train.micro_batch * run.train.seq_len // layout.cp
    heads = run.model.num_heads // layout.tp
    kv_heads = run.model.num_kv_heads // layout.tp
    return Sizes(
        run,
        layout,
        ShardCoords.of(layout, 0),
        size=BYTES[run.precision.params],
        tokens=tokens,
        local=tokens // layout.tp,
        heads=heads,
        kv_heads=kv_heads,
        recompute=recompute_policy(run),
        load=busiest_load(run) if load is None else load,
    )


def swiglu(
    trace: Trace, s: Sizes, x: TracedTensor, weights: MlpWeights, part: Recompute | None = None
) -> TracedTensor:
    """Trace a feed-forward; `part` names the recomputation of its activation."""
    up = column_parallel(trace, s, x, weight=weights.w_up)
    inner = activation(trace, up, part)
    return row_parallel(trace, s, inner, weight=weights.w_down, holds=[x, up])


def activation(
    trace: Trace,
    up: TracedTensor,
    part: Recompute | None,
    used: float = 1.0,
    scratch: tuple[int, int] = (0, 0),
) -> TracedTensor:
    """Trace silu(gate) · up, of which only the input is saved."""
    half = up.bytes // 2
    with trace.recomputed(part, discards=True):
        return trace.op([up], [half], [up], scratch=scratch, work=Work.activation, used=used)[0]


def norm(trace: Trace, s: Sizes, x: TracedTensor, weights: NormWeights) -> TracedTensor:
    """Trace RMSNorm of this rank's tokens."""
    return _norm(trace, s, x, weights=weights)[0]


def norm_beside(
    trace: Trace, s: Sizes, x: TracedTensor, weights: NormWeights
) -> tuple[TracedTensor, TracedTensor]:
    """Trace RMSNorm of the residual stream; return `x` for the residual addition, and its norm.

    One backward kernel adds the gradients of both. The norm may be recomputed.
    """
    with trace.recomputed(Recompute.norm, discards=True):
        h, same = _norm(trace, s, x, weights=weights, views=[TracedTensor(x.bytes, x.storage)])
    return same, h


def _norm(
    trace: Trace,
    s: Sizes,
    x: TracedTensor,
    *,
    weights: NormWeights,
    views: Sequence[TracedTensor] = (),
) -> tuple[TracedTensor, ...]:
    """Trace RMSNorm, which also returns `views`."""
    (width,) = s.shape(weights.weight)
    rows = x.bytes // (width * s.size)
    sums = 4 * width * norm_tiling(width).programs(rows)  # partial gradients of the weight, fp32
    keeps = RMS_STATISTICS * rows
    return trace.op([x], [x.bytes, *views], [x], keeps=keeps, scratch=(0, sums), work=Work.norm)


def cast(trace: Trace, x: TracedTensor, size: int) -> TracedTensor:
    """Trace a cast to another element type, of `size` bytes in all."""
    return x if size == x.bytes else trace.op([x], [size])[0]


@dataclass(frozen=True, slots=True)
class Gemm:
    """GEMM of rows of width I with a weight O × I of this rank."""

    weight: int  # bytes of the weight
    made: int  # bytes of the output, rows of width O
    flops: int
    rows: int
    widths: tuple[int, int]  # O and I
    operands: GemmOperands

    @classmethod
    def of(cls, s: Sizes, weight: Weight, x: int) -> Gemm:
        """Build the GEMM for an input of `x` bytes."""
        made, taken = s.shape(weight)
        rows = x // (taken * s.size)
        return cls(
            s.weight(weight),
            rows * made * s.size,
            flops=2 * rows * made * taken,
            rows=rows,
            widths=(made, taken),
            operands=GemmOperands.of(s.in_fp8, rows, made=made, taken=taken),
        )


def column_parallel(trace: Trace, s: Sizes, x: TracedTensor, weight: Weight) -> TracedTensor:
    """Trace a column-parallel linear layer for all tokens.

    A weight that is whole on every rank takes the rank's own tokens.
    """
    if s.layout.tp == 1 or weight.tp is None:
        return _gemm(trace, s, x, weight=weight)
    whole = s.layout.tp * x.bytes
    ordered = s.copies * s.layout.tp * x.bytes
    gemm = Gemm.of(s, weight, whole)
    given, back = gemm.operands.given.both, gemm.operands.back.both
    # quantized from all tokens, which are freed before the GEMM begins
    read = max(whole, ordered - gemm.made, whole + given - gemm.made, given)
    # backward: the all-gather in flight, then reordered, beside what is reduce-scattered; a split
    # backward gathers later
    grads = ordered + back + (0 if s.splits else whole + given)
    return trace.op(
        [x],
        [gemm.made],
        [x],
        weight=gemm.weight,
        added=s.added,
        deferred=s.deferred(gemm.weight, ordered + given),
        waiting=gemm.operands.waiting,
        scratch=(read, grads),
        kernels=1 + s.copies + gemm.operands.launches,
        flops=gemm.flops,
        fp8=gemm.operands.quantised_again,
        sends=tp_sends(s, x.bytes, forward=1, backward=2),
        work=Work.gemm,
    )[0]


def row_parallel(
    trace: Trace, s: Sizes, x: TracedTensor, weight: Weight, holds: Sequence[TracedTensor]
) -> TracedTensor:
    """Trace a row-parallel linear layer, reduce-scattered over the tokens.

    `holds`: tensors that the caller keeps alive.
    """
    whole = _gemm(trace, s, x, weight=weight, holds=holds)
    return scattered(trace, s, whole, holds=(x, *holds))


def _gemm(
    trace: Trace, s: Sizes, x: TracedTensor, weight: Weight, holds: Sequence[TracedTensor] = ()
) -> TracedTensor:
    """Trace the GEMM of the tokens on a rank with its part of the weight."""
    gemm = Gemm.of(s, weight, x.bytes)
    operands = gemm.operands
    kept = [] if operands.kept is None else [operands.kept]
    return trace.op(
        [x],
        [gemm.made, *kept],
        [1] if kept else [x],
        holds=holds,
        weight=gemm.weight,
        added=s.added,
        deferred=s.deferred(gemm.weight),
        waiting=operands.waiting,
        scratch=(operands.given.rows, operands.back.both),
        kernels=1 + operands.launches,
        flops=gemm.flops,
        work=Work.gemm,
        fp8=operands.fp8,
    )[0]


def scattered(
    trace: Trace, s: Sizes, whole: TracedTensor, holds: Sequence[TracedTensor] = ()
) -> TracedTensor:
    """Trace the reduce-scatter of partial sums to each tensor-parallel rank's tokens."""
    if s.layout.tp == 1:
        return whole
    own = whole.bytes // s.layout.tp
    ordered = (s.copies - 1) * whole.bytes
    scratch = (ordered, ordered)
    sends = tp_sends(s, own, forward=1, backward=1)
    return trace.op([whole], [own], holds=holds, scratch=scratch, kernels=s.copies, sends=sends)[0]


def tp_sends(s: Sizes, own: int, forward: int, backward: int) -> Sends:
    """Return sends of ring all-gathers and reduce-scatters over the tensor-parallel ranks.

    forward, backward: how many. own: bytes of a rank's own tokens.
    """
    each = (s.layout.tp - 1) * own
    return Sends(TP, Way.ring, forward=forward * each, backward=backward * each)
