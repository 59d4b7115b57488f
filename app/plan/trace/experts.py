"""Mixture-of-experts bodies as traces: what `app.moe` does on a GPU, phase by phase, in bytes.

Shapes: as in `app.plan.trace.parts`, and E experts, K per token.
"""

from __future__ import annotations

from app.choices import Balance, Recompute, Score
from app.config import MoEConfig
from app.plan.dispatchers.choose import planned_dispatcher
from app.plan.dispatchers.record import PlannedDispatcher, Tokens
from app.plan.model.phases import PhaseName
from app.plan.trace.parts import Sizes, activation, cast, norm, swiglu
from app.plan.trace.trace import Trace, TracedTensor

# bytes of an expert's load in its loss
LOAD = {Balance.microbatch: 8, Balance.sequence: 8, Balance.global_batch: 4}


def moe_body(trace: Trace, s: Sizes, moe: MoEConfig, x: TracedTensor) -> TracedTensor:
    """Everything in an MoE layer behind attention (`MoEBody`)."""
    with trace.recomputed(s.recomputes(Recompute.moe)):
        trace.phase = PhaseName.norm
        with trace.recomputed(s.recomputes(Recompute.norm), discards=True):
            h = norm(trace, s, x)
        shared = _shared(trace, s, moe, h=h) if moe.shared_ffn_hidden_size else None
        probs, chosen = _route(trace, s, moe, h=h)
        y = _routed(trace, s, moe, h=h, probs=probs, chosen=chosen)
        trace.phase = PhaseName.finish
        both = trace.add(x, y)
        return both if shared is None else trace.add(both, shared, holds=[x, y])


def _shared(trace: Trace, s: Sizes, moe: MoEConfig, h: TracedTensor) -> TracedTensor:
    trace.phase = PhaseName.shared
    with trace.recomputed(s.recomputes(Recompute.shared)):
        out = swiglu(trace, s, h, width=moe.shared_ffn_hidden_size // s.layout.tp, recomputed=False)
        if not moe.shared_gate:
            return out
        (gate,) = trace.op(
            [h], [s.local * s.size], [h], weight=s.weight(1), flops=s.product(s.local, s.weight(1))
        )
        (gate,) = trace.op([gate], [gate.bytes], [0])
        return trace.op([gate, out], [out.bytes], [gate, out])[0]


def _route(
    trace: Trace, s: Sizes, moe: MoEConfig, h: TracedTensor
) -> tuple[TracedTensor, TracedTensor]:
    """Probabilities and the experts they belong to: 4 and 8 bytes per token and expert of it."""
    trace.phase = PhaseName.route
    scores = 4 * s.local * moe.num_experts
    picked = 4 * s.local * moe.top_k
    weight = 4 * s.model.hidden_size * moe.num_experts
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
        flops=2 * s.local * s.model.hidden_size * moe.num_experts,
    )
    after = moe.score is Score.softmax and not moe.pre_softmax
    ranked = logits if after else trace.op([logits], [scores], [0])[0]
    (chosen,) = trace.op([], [2 * picked], holds=[ranked])
    (probs,) = trace.op([ranked], [picked], [ranked, chosen])
    if after:
        (probs,) = trace.op([probs], [picked], [0])
    elif moe.score is Score.sigmoid and moe.top_k > 1:
        (probs,) = trace.op([probs], [picked], [probs], keeps=4 * s.local, kernels=3)
    if moe.routed_scale is not None:
        (probs,) = trace.op([probs], [picked])
    if moe.capacity_factor is not None:
        # zero for what is dropped
        (probs,) = trace.op([probs], [picked], keeps=picked // 4, kernels=12)
    _router_losses(trace, s, moe, logits=logits)
    return probs, chosen


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
    moe: MoEConfig,
    h: TracedTensor,
    probs: TracedTensor,
    chosen: TracedTensor,
) -> TracedTensor:
    """What the experts make of the tokens, by way of the run's dispatcher."""
    dispatcher = planned_dispatcher(moe, s.layout.ep, s.layout.expert_tp)
    tokens = Tokens(s.local, s.model.hidden_size, s.size)
    trace.phase = PhaseName.preprocess
    rows = dispatcher.trace_preprocess(trace, tokens, chosen)
    trace.phase = PhaseName.dispatch
    x = dispatcher.trace_dispatch(trace, tokens, h, rows=rows)
    trace.phase = PhaseName.experts
    expert_out = _experts(trace, s, dispatcher, x=x, ends=rows.ends)
    trace.phase = PhaseName.combine
    return dispatcher.trace_combine(trace, tokens, expert_out, probs=probs, rows=rows)


def _experts(
    trace: Trace, s: Sizes, dispatcher: PlannedDispatcher, x: TracedTensor, ends: TracedTensor
) -> TracedTensor:
    """Grouped products, in 1/etp of the width."""
    width = dispatcher.moe.ffn_hidden_size // dispatcher.etp
    weight = dispatcher.experts * s.weight(width)
    rows = dispatcher.rows(s.local).computed
    # fewer than those where a capacity leaves some empty and nobody waits to learn how many
    filled = round(dispatcher.mean_rows(s.local) * s.load)
    flops = s.product(filled, s.weight(width))
    (up,) = trace.op(
        [x],
        [2 * rows * width * s.size],
        [x, ends],
        weight=2 * weight,
        added=s.added,
        deferred=s.deferred(2 * weight),
        flops=2 * flops,
    )
    inner = activation(trace, up, s.recomputes(Recompute.experts_act))
    deferred = s.deferred(weight)
    return trace.op(
        [inner],
        [x.bytes],
        [inner, ends],
        holds=[x, up],
        weight=weight,
        added=s.added,
        deferred=deferred,
        flops=flops,
    )[0]
