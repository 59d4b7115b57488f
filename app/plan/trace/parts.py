"""What the traces of a run have in common: sizes, and the parts that layers are made of.

With tp > 1 the residual stream, norms, router and dispatch have 1/tp of the tokens (sequence
parallelism, Korthikanti et al. 2022); attention and feed-forward see all of them in 1/tp of the
width. A widening product gathers the tokens first, keeps only its own part of them, and gathers
again in backward for the gradient of its weights. Gathered parts of several sequences are copied
once more, into the order of the tokens. Sizes of weights, and of what products make, come from the
descriptions of `app.plan.model` alone. All sizes are bytes.

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
from app.plan.dispatchers.choose import busiest_load
from app.plan.groups import TP, Way
from app.plan.layout import ParallelLayout
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Weight
from app.plan.recompute import RecomputePolicy, recompute_policy
from app.plan.sharding.blocks import ShardCoords
from app.plan.trace.fp8 import GemmOperands
from app.plan.trace.trace import GradAddition, Sends, Trace, TracedTensor, Work

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2, Dtype.float16: 2}
RMS_STATISTICS = 4  # per row, what RMSNorm saves besides its input: an fp32 number


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the traces of a run have in common; sizes are bytes, of one microbatch on one rank."""

    run: Run
    layout: ParallelLayout
    coords: ShardCoords  # of one rank; parts of weights are of equal shapes on all
    size: int  # bytes of an element of parameters and activations
    tokens: int  # T
    local: int  # T / tp: tokens outside of attention and feed-forward
    heads: int  # N
    kv_heads: int  # G
    recompute: RecomputePolicy
    load: float  # rows of this rank's experts, over the mean of their expert-parallel group
    # by which products of linear layers are in FP8 in the part that is traced; None: not
    in_8: Fp8Recipe | None = None
    experts_in_8: bool = False  # whether products of experts are

    @property
    def model(self) -> ModelConfig:
        """The run's model."""
        return self.run.model

    @property
    def stream(self) -> int:
        """The residual stream: T/tp × D."""
        return self.local * self.model.hidden_size * self.size

    @property
    def rotary(self) -> int:
        """Cosines and sines that all layers of a microbatch share, fp32: 2 × T × what they turn."""
        return 2 * 4 * self.tokens * self.model.rope.width

    @property
    def mask(self) -> int:
        """The document mask, if there is one: a byte per query and token of its sequence."""
        cut = self.layout.cp if self.run.parallel.cp_comm_type is CpComm.all_gather else 1
        if not self.run.data.document_mask:
            return 0
        return self.tokens * self.layout.cp // cut * self.run.train.seq_len

    @property
    def copies(self) -> int:
        """Copies of gathered tokens that are alive while they are put into order: 1 or 2."""
        return min(self.run.train.micro_batch, 2)

    def shape(self, weight: Weight) -> tuple[int, ...]:
        """Of this rank's part of a weight."""
        return self.coords.shape(weight)

    def weight(self, weight: Weight) -> int:
        """This rank's part of it."""
        return prod(self.shape(weight)) * self.size

    @property
    def splits(self) -> bool:
        """Whether backward leaves gradients of matrices for later."""
        return self.run.schedule.name in (ScheduleName.zero_bubble_h1, ScheduleName.zero_bubble_v)

    @property
    def fused(self) -> bool:
        """Whether gradients of matrices are added to sums of more bits inside their products."""
        return BYTES[self.run.precision.grads] > self.size

    @property
    def direct(self) -> bool:
        """Whether backward does that at once."""
        return self.fused and not self.splits

    @property
    def added(self) -> GradAddition:
        """How backward adds gradients of matrices."""
        return GradAddition.inside if self.direct or self.splits else GradAddition.after

    def deferred(self, weight: int, gathered: int = 0) -> int | None:
        """What such a gradient takes when it is computed at last: itself, unless it is never
        there, beside what is gathered.
        """
        return gathered + (0 if self.fused else weight) if self.splits else None


def sizes_of(run: Run, layout: ParallelLayout, load: float | None = None) -> Sizes:
    """Sizes of one microbatch on one rank; `load` None: that of the busiest."""
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
    """A feed-forward; `part`: what recomputes its activation."""
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
    """silu(gate) · up, of the two halves of the widened rows, which alone are kept."""
    half = up.bytes // 2
    with trace.recomputed(part, discards=True):
        return trace.op([up], [half], [up], scratch=scratch, work=Work.activation, used=used)[0]


def norm(trace: Trace, s: Sizes, x: TracedTensor, weights: NormWeights) -> TracedTensor:
    """RMSNorm of this rank's tokens."""
    return _norm(trace, s, x, weights=weights)[0]


def norm_beside(
    trace: Trace, s: Sizes, x: TracedTensor, weights: NormWeights
) -> tuple[TracedTensor, TracedTensor]:
    """`x` for the residual sum, and its norm, which backward recomputes where it does so: its
    kernel of backward sums the gradients of both.
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
    """The norm, and what else it hands on."""
    (width,) = s.shape(weights.weight)
    rows = x.bytes // (width * s.size)
    sums = 4 * width * norm_tiling(width).programs(rows)  # of the weight's gradient, fp32
    keeps = RMS_STATISTICS * rows
    return trace.op([x], [x.bytes, *views], [x], keeps=keeps, scratch=(0, sums), work=Work.norm)


def cast(trace: Trace, x: TracedTensor, size: int) -> TracedTensor:
    """In another element type, of `size` bytes in all."""
    return x if size == x.bytes else trace.op([x], [size])[0]


@dataclass(frozen=True, slots=True)
class Gemm:
    """A matrix O × I of this rank, and rows of width I that it is multiplied with."""

    weight: int  # the matrix
    made: int  # the rows of width O
    flops: int
    rows: int
    widths: tuple[int, int]  # O and I
    operands: GemmOperands

    @classmethod
    def of(cls, s: Sizes, weight: Weight, x: int) -> Gemm:
        """For rows of `x` bytes in all."""
        made, taken = s.shape(weight)
        rows = x // (taken * s.size)
        return cls(
            s.weight(weight),
            rows * made * s.size,
            flops=2 * rows * made * taken,
            rows=rows,
            widths=(made, taken),
            operands=GemmOperands.of(s.in_8, rows, made=made, taken=taken),
        )


def column_parallel(trace: Trace, s: Sizes, x: TracedTensor, weight: Weight) -> TracedTensor:
    """A product with rows of the weight cut by tp, for all tokens; with a weight that every rank
    holds whole, for its own tokens.
    """
    if s.layout.tp == 1 or weight.tp is None:
        return _gemm(trace, s, x, weight=weight)
    whole = s.layout.tp * x.bytes
    ordered = s.copies * s.layout.tp * x.bytes
    gemm = Gemm.of(s, weight, whole)
    given, back = gemm.operands.given.both, gemm.operands.back.both
    # quantised from all tokens, which are gone when the product begins
    read = max(whole, ordered - gemm.made, whole + given - gemm.made, given)
    # backward: its gather under way, then put into order, beside what it scatters; a split one does
    # not gather yet
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
    """A product with columns cut by tp, summed over the ranks, each of which gets its tokens.

    `holds`: what the caller still has.
    """
    whole = _gemm(trace, s, x, weight=weight, holds=holds)
    return scattered(trace, s, whole, holds=(x, *holds))


def _gemm(
    trace: Trace, s: Sizes, x: TracedTensor, weight: Weight, holds: Sequence[TracedTensor] = ()
) -> TracedTensor:
    """Of the tokens that a rank has and its part of the weight."""
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
    """This rank's tokens of a sum over the tensor-parallel ranks."""
    if s.layout.tp == 1:
        return whole
    own = whole.bytes // s.layout.tp
    ordered = (s.copies - 1) * whole.bytes
    scratch = (ordered, ordered)
    sends = tp_sends(s, own, forward=1, backward=1)
    return trace.op([whole], [own], holds=holds, scratch=scratch, kernels=s.copies, sends=sends)[0]


def tp_sends(s: Sizes, own: int, forward: int, backward: int) -> Sends:
    """So many all-gathers and reduce-scatters by a ring of the tensor-parallel ranks, each of which
    has `own` bytes of its own tokens in the end.
    """
    each = (s.layout.tp - 1) * own
    return Sends(TP, Way.ring, forward=forward * each, backward=backward * each)
