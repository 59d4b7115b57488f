"""Trace of mixture-of-experts bodies: the operations of `app.moe` on a GPU, in bytes.

Shapes: as in `app.plan.parts.parts`, and E experts, K per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from app.choices import Balance, Dtype, Recompute, Score
from app.config import MoEConfig
from app.kernels.tiling import PARTS
from app.plan.model.experts import ExpertWeights, MoEBodyWeights, RouterWeights
from app.plan.model.weight import Weight
from app.plan.parts.dispatch_record import PlannedDispatcher, Tokens
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.fp8 import Fp8Work, rows_in_fp8
from app.plan.parts.paged_buffer import page_numbers
from app.plan.parts.parts import Gemm, Sizes, activation, cast, norm_beside, swiglu
from app.plan.parts.trace import Trace, TracedTensor, Work
from app.plan.phases import PhaseName

# bytes of an expert's load in the load-balancing loss
LOAD = {Balance.microbatch: 8, Balance.sequence: 8, Balance.global_batch: 4}


def moe_body(trace: Trace, s: Sizes, x: TracedTensor, weights: MoEBodyWeights) -> TracedTensor:
    """Trace an MoE layer after attention (`MoEBody`)."""
    moe = s.model.moe
    assert moe is not None
    with trace.recomputed(Recompute.moe):
        trace.phase = PhaseName.norm
        x, h = norm_beside(trace, s, x, weights=weights.norm)
        shared = _shared(trace, s, h, weights=weights)
        probs, chosen = _route(trace, s, moe, h=h, weights=weights.router)
        dispatcher = run_dispatcher(s.run, s.layout)
        assert dispatcher is not None
        y = _routed(trace, s, dispatcher, h=h, weights=weights.experts, probs=probs, chosen=chosen)
        trace.phase = PhaseName.finish
        both = trace.add(x, y)
        return both if shared is None else trace.add(both, shared, holds=[x, y])


def _shared(
    trace: Trace, s: Sizes, h: TracedTensor, weights: MoEBodyWeights
) -> TracedTensor | None:
    """Trace the shared expert; None if there is none."""
    if weights.shared is None:
        return None
    trace.phase = PhaseName.shared
    with trace.recomputed(Recompute.shared):
        out = swiglu(trace, s, h, weights=weights.shared)
        if weights.shared_gate is None:
            return out
        gemm = Gemm.of(s, weights.shared_gate, h.bytes)
        (gate,) = trace.op(
            [h],
            [gemm.made],
            [h],
            weight=gemm.weight,
            flops=gemm.flops,
            work=Work.gemm,
        )
        (gate,) = trace.op([gate], [gate.bytes], [0])
        return trace.op([gate, out], [out.bytes], [gate, out])[0]


def _route(
    trace: Trace, s: Sizes, moe: MoEConfig, h: TracedTensor, weights: RouterWeights
) -> tuple[TracedTensor, TracedTensor]:
    """Trace the router; return probabilities and expert ids, 4 and 8 bytes per choice."""
    trace.phase = PhaseName.route
    gemm = Gemm.of(s, weights.weight, h.bytes)
    picked = 4 * s.local * moe.top_k
    logits = _router_matmul(trace, s, moe, h=h, gemm=gemm)
    after = moe.score is Score.softmax and not moe.pre_softmax
    ranked = logits if after else trace.op([logits], [logits.bytes], [0])[0]
    (chosen,) = trace.op([], [2 * picked], holds=[ranked])
    (probs,) = trace.op([ranked], [picked], [ranked, chosen])
    if after:
        (probs,) = trace.op([probs], [picked], [0])
    elif moe.normalizes_sigmoids:
        (probs,) = trace.op([probs], [picked], [probs], keeps=4 * s.local, kernels=3)
    if moe.routed_scale is not None:
        (probs,) = trace.op([probs], [picked])
    if moe.capacity_factor is not None:
        # probability 0 for dropped choices
        (probs,) = trace.op([probs], [picked], keeps=picked // 4, kernels=12)
        (chosen,) = trace.op([], [2 * picked], holds=[chosen], kernels=0)
    _router_losses(trace, s, moe, logits=logits)
    return probs, chosen


def _router_matmul(
    trace: Trace, s: Sizes, moe: MoEConfig, h: TracedTensor, gemm: Gemm
) -> TracedTensor:
    """Trace the fp32 scores as `app.moe.router_matmul` computes them."""
    scores = gemm.made // s.size * 4
    if s.run.precision.params is Dtype.bfloat16 and not moe.jitter_eps:
        # the fp32 gradient is split into three bf16 parts; the weight's gradients are fp32
        backward = PARTS * (2 * (scores // 4 + gemm.weight // s.size) + 2 * gemm.weight)
        (logits,) = trace.op(
            [h],
            [scores],
            [h],
            weight=gemm.weight,
            scratch=(0, backward),
            kernels=2,
            flops=gemm.flops,
            work=Work.router_matmul,
        )
        return logits
    weight = gemm.weight // s.size * 4
    wide = cast(trace, h, h.bytes // s.size * 4)
    if moe.jitter_eps:
        (wide,) = trace.op([wide], [wide.bytes], keeps=wide.bytes, kernels=2)
    (logits,) = trace.op(
        [wide],
        [scores],
        [wide],
        keeps=0 if s.size == 4 else weight,
        weight=weight,
        kernels=2,
        flops=gemm.flops,
        work=Work.router_matmul,
    )
    return logits


def _router_losses(trace: Trace, s: Sizes, moe: MoEConfig, logits: TracedTensor) -> None:
    if moe.aux_loss_coeff:
        loads = s.run.train.micro_batch if moe.balance is Balance.sequence else 1
        (scores,) = trace.op([logits], [logits.bytes], [0])
        if moe.score is Score.sigmoid:
            (scores,) = trace.op([scores], [logits.bytes], [scores], keeps=4 * s.local, kernels=3)
        trace.op([scores], [4], keeps=loads * LOAD[moe.balance] * moe.num_experts, kernels=10)
    if moe.z_loss_coeff:
        (summed,) = trace.op([logits], [4 * s.local], [logits, 0])
        trace.op([summed], [4], [summed], kernels=3)


def _routed(
    trace: Trace,
    s: Sizes,
    dispatcher: PlannedDispatcher,
    h: TracedTensor,
    weights: ExpertWeights,
    probs: TracedTensor,
    chosen: TracedTensor,
) -> TracedTensor:
    """Trace dispatch, experts and combine with the run's dispatcher."""
    width = s.model.hidden_size
    in_fp8 = rows_in_fp8(1, width) if s.experts_in_fp8 and dispatcher.quantises else 0
    tokens = Tokens(s.local, width, s.size, in_fp8=in_fp8)
    trace.phase = PhaseName.preprocess
    rows = dispatcher.trace_preprocess(trace, tokens, chosen)
    trace.phase = PhaseName.dispatch
    x = dispatcher.trace_dispatch(trace, tokens, h, rows=rows)
    trace.phase = PhaseName.experts
    # below the capacity if that leaves rows empty, without telling the host how many
    filled = round(dispatcher.mean_rows(s.local) * s.load)
    expert_out = _experts(trace, s, dispatcher, x=x, weights=weights, ends=rows.ends, filled=filled)
    trace.phase = PhaseName.combine
    return dispatcher.trace_combine(trace, tokens, expert_out, probs=probs, rows=rows)


def _experts(
    trace: Trace,
    s: Sizes,
    dispatcher: PlannedDispatcher,
    x: TracedTensor,
    weights: ExpertWeights,
    ends: TracedTensor,
    filled: int,
) -> TracedTensor:
    """Trace the experts' grouped GEMMs; `filled`: rows with a token."""
    gemm = partial(_grouped, trace, s, dispatcher, ends=ends, filled=filled)
    up = gemm(x, weights.w_up, ready=dispatcher.quantises)
    used = filled * s.model.hidden_size * s.size / x.bytes
    in_fp8 = (0, 0)
    # FP8 copies of the activation, and of its gradient, for the GEMMs that follow
    if s.experts_in_fp8:
        _, width, _ = s.shape(weights.w_down)
        rows = up.bytes // (2 * width * s.size)
        in_fp8 = rows_in_fp8(rows, width), rows_in_fp8(rows, 2 * width)
    inner = activation(trace, up, Recompute.experts_act, used=min(1.0, used), scratch=in_fp8)
    out = gemm(inner, weights.w_down, holds=[x, up], ready=True)
    if dispatcher.paged_buffers and trace.segment is None:
        act = () if Recompute.experts_act in trace.recompute.parts else (inner,)
        paged = (x, up, *act, out)
        trace.paged.update(each.storage for each in paged)
        numbers = page_numbers(s.run, dispatcher, trace.recompute)
        trace.op([], [], holds=paged[:2], keeps=numbers, kernels=2 * len(paged))
    return out


def _grouped(
    trace: Trace,
    s: Sizes,
    dispatcher: PlannedDispatcher,
    x: TracedTensor,
    weight: Weight,
    *,
    ends: TracedTensor,
    filled: int,
    holds: Sequence[TracedTensor] = (),
    ready: bool = False,
) -> TracedTensor:
    """Trace the grouped GEMM of rows with their expert's weight, or this rank's etp part of it.

    `ready`: the kernel that produced the rows has also written their FP8 copies, if any.
    """
    _, taken, made = s.shape(weight)
    size = s.weight(weight)
    out = x.bytes // taken * made
    # inputs of a deferred weight gradient are copied back from pages first
    paged_buffers = dispatcher.paged_buffers
    transfer = dispatcher.clone_transfer(taken * made, s.size)
    scratch, launches, fp8 = (0, 0), 1, None
    if s.experts_in_fp8:  # not together with clones
        rows = x.bytes // (taken * s.size)
        fp8 = Fp8Work(None, rows * taken, rows * made)
        scratch = rows_in_fp8(rows, taken), rows_in_fp8(rows, made)
        launches += 0 if ready else 1
    if transfer is not None:
        scratch, launches = transfer.scratch, launches + transfer.kernels
    return trace.op(
        [x],
        [out],
        [x, ends],
        holds=holds,
        weight=size,
        added=s.added,
        deferred=s.deferred(size, x.bytes + out if paged_buffers else 0),
        waits=not paged_buffers,
        scratch=scratch,
        kernels=launches,
        flops=2 * filled * taken * made,
        fp8=fp8,
        sends=None if transfer is None else transfer.sends,
        work=Work.grouped,
        used=min(1.0, filled * taken * s.size / x.bytes),
    )[0]
