"""Traces of the transformer: the operations of `app.model` on a GPU.

Each function follows the code of the same name there. An operation saves what its CUDA kernel
saves: torch's own, or those of `app.kernels`. All sizes are bytes.
"""

from __future__ import annotations

from app.choices import Recompute
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.layer import DenseBodyWeights, LayerWeights
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Weight
from app.plan.parts.attention import attention
from app.plan.parts.experts import moe_body
from app.plan.parts.fp8 import GemmOperands
from app.plan.parts.parts import Gemm, Sizes, norm, norm_beside, scattered, swiglu, tp_sends
from app.plan.parts.trace import ForwardTrace, GradAddition, Sends, Trace, TracedTensor, Work
from app.plan.phases import PhaseName
from app.plan.recompute import RecomputeChoice

# bytes that the loss saves per token: index of its label, log-sum-exp, validity
PER_LABEL = 8 + 4 + 1
LOSS_KERNELS = 9  # kernel launches after the logits
# bytes per token of the three fp32 numbers of all vocabulary shards, while these are merged
STATISTICS = 2 * 3 * 4


def layer_trace(s: Sizes, weights: LayerWeights, recompute: RecomputeChoice) -> ForwardTrace:
    """Trace a dense or MoE layer under a choice of recomputation."""
    trace = Trace(recompute)
    given = trace.value(s.stream)
    with trace.whole_layer():
        x = _attention(trace, s, given, weights=weights)
        if isinstance(weights.body, MoEBodyWeights):
            x = moe_body(trace, s, x, weights=weights.body)
        else:
            x = _dense_body(trace, s, x, weights=weights.body)
    return ForwardTrace(trace, given, x)


def embedding_trace(s: Sizes, table: Weight) -> ForwardTrace:
    """Trace the lookup; with tp > 1 each rank has a part of the vocabulary."""
    trace = Trace(phase="embedding")
    _, width = s.shape(table)
    whole = s.tokens * width * s.size
    weight = s.weight(table)
    given = trace.value(0)
    if s.layout.tp == 1:
        return ForwardTrace(trace, given, trace.op([], [whole], weight=weight)[0])
    (rows,) = trace.op([], [whole], weight=weight, keeps=8 * s.tokens, kernels=4)
    (own,) = trace.op([rows], [whole], keeps=s.tokens)  # zero for tokens of other ranks
    return ForwardTrace(trace, given, scattered(trace, s, own))


def head_trace(s: Sizes, norm_weights: NormWeights, table: Weight, tied: bool) -> ForwardTrace:
    """Trace the final norm and the loss (`app.model.layers.loss`); `tied` to an embedding here."""
    trace = Trace(phase="head")
    given = trace.value(s.stream)
    h = norm(trace, s, given, weights=norm_weights)
    by = _loss_of_kept_logits if s.run.loss.chunk_tokens is None else _loss_by_chunks
    by(trace, s, h, table=table, added=GradAddition.after if tied and s.direct else s.added)
    return ForwardTrace(trace, given, None)


def _loss_of_kept_logits(
    trace: Trace, s: Sizes, h: TracedTensor, table: Weight, added: GradAddition
) -> None:
    """Trace the loss with all logits at once, which backward overwrites with their gradient.

    Gathered hidden states stay for the weight gradient.
    """
    parts = s.layout.tp
    gemm = Gemm.of(s, table, parts * h.bytes)
    operands = gemm.operands
    given, back = operands.given.both, operands.back.both
    there = gemm.weight if added is GradAddition.after else 0
    gathered = parts * h.bytes if parts > 1 else 0
    ordered = s.copies * gathered
    # backward, beside the weight gradient if that is stored: while it quantises the operands, then
    # while it scatters the input gradient
    waiting = operands.given.columns + operands.back.columns
    put = 2 * gathered + max(given + back, max(0, ordered - gathered - there) + waiting)
    read = max(gathered, ordered - gemm.made) + given
    carries = gathered - h.bytes if parts > 1 else 0
    if s.splits and operands.kept is not None and operands.waiting is not None:
        carries = operands.kept + operands.waiting
    (logits,) = trace.op(
        [h],
        [gemm.made],
        [h, 0],
        weight=gemm.weight,
        added=added,
        deferred=s.deferred(gemm.weight),
        waits=operands.kept is None,
        carries=carries,
        scratch=(read, put),
        kernels=1 + operands.launches,
        flops=gemm.flops,
        fp8=operands.quantised_again,
        sends=_gathers_twice(s, h),
        work=Work.gemm,
    )
    scratch = gathered + STATISTICS * s.tokens, ordered
    keeps = PER_LABEL * s.tokens
    trace.op(
        [logits],
        [4],
        keeps=keeps,
        scratch=scratch,
        passes=True,
        kernels=LOSS_KERNELS,
        work=Work.loss,
    )


def _loss_by_chunks(
    trace: Trace, s: Sizes, h: TracedTensor, table: Weight, added: GradAddition
) -> None:
    """Trace the loss over chunks of tokens.

    Logits are recomputed in backward, the weight gradient accumulates in fp32.
    """
    chunk = min(s.run.loss.chunk_tokens or s.tokens, s.tokens)
    parts = s.layout.tp
    gemm = Gemm.of(s, table, parts * h.bytes)
    logits = gemm.made // s.tokens * chunk
    gathered = parts * h.bytes if parts > 1 else 0
    # the next chunk's logits, before this one's are freed
    following = logits if chunk < s.tokens else 0
    ordered = s.copies * gathered
    gradient = parts * h.bytes
    table_sum = gemm.weight // s.size * 4
    made, taken = gemm.widths
    operands = GemmOperands.of(s.in_fp8, gemm.rows * chunk // s.tokens, made=made, taken=taken)
    given, back = operands.given.both, operands.back.both
    loop = logits + max(following, gemm.weight) + given + back
    read = logits + following + given
    # the weight gradient, if it is stored beside that of the hidden states
    there = gemm.weight if added is GradAddition.after else 0
    end = (h.bytes if parts > 1 else 0) + max(ordered - gathered, 0 if s.size == 4 else there)
    most = gathered + gradient + table_sum + max(loop, end)
    scratch = max(ordered, gathered + read), max(ordered, most) - h.bytes - there
    keeps = PER_LABEL * s.tokens
    kernels = LOSS_KERNELS + 2 * -(-s.tokens // chunk)
    trace.op(
        [h],
        [4],
        [h],
        keeps=keeps,
        weight=gemm.weight,
        added=added,
        carries=table_sum,
        scratch=scratch,
        kernels=kernels,
        flops=gemm.flops,
        flops_recomputed=gemm.flops,
        fp8=gemm.operands.fp8,
        sends=_gathers_twice(s, h),
        work=Work.gemm,
    )


def _gathers_twice(s: Sizes, h: TracedTensor) -> Sends:
    """Return sends of the head: all-gather in forward; all-gather and reduce-scatter in
    backward.
    """
    return tp_sends(s, h.bytes, forward=1, backward=2)


def _attention(trace: Trace, s: Sizes, x: TracedTensor, weights: LayerWeights) -> TracedTensor:
    trace.phase = PhaseName.attn
    x, h = norm_beside(trace, s, x, weights=weights.attn_norm)
    return trace.add(x, attention(trace, s, h, weights=weights.attn))


def _dense_body(trace: Trace, s: Sizes, x: TracedTensor, weights: DenseBodyWeights) -> TracedTensor:
    trace.phase = PhaseName.mlp
    x, h = norm_beside(trace, s, x, weights=weights.norm)
    y = swiglu(trace, s, h, weights=weights.mlp, part=Recompute.mlp_act)
    return trace.add(x, y)
