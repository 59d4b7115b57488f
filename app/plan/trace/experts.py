"""Mixture-of-experts bodies as tapes: what `app.moe` does on a GPU, phase by phase, in bytes.

Shapes: as in `tape_parts`, and E experts, K per token · R rows of the experts of a rank · P = etp ·
ep ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.choices import Balance, DispatcherKind, Recompute, Score
from app.config import MoEConfig
from app.plan.cost.flops import busiest_load, capacity_load
from app.plan.trace.parts import Sizes, activation, cast, norm, swiglu
from app.plan.trace.trace import Trace, TracedTensor

# bytes of an expert's load in its loss
LOAD = {Balance.microbatch: 8, Balance.sequence: 8, Balance.global_batch: 4}


def moe_body(trace: Trace, s: Sizes, moe: MoEConfig, x: TracedTensor) -> TracedTensor:
    """Everything in an MoE layer behind attention (`MoEBody`)."""
    with trace.again(s.recomputes(Recompute.moe)):
        trace.phase = "norm"
        with trace.again(s.recomputes(Recompute.norm), discards=True):
            h = norm(trace, s, x)
        shared = _shared(trace, s, moe, h=h) if moe.shared_ffn_hidden_size else None
        probs, chosen = _route(trace, s, moe, h=h)
        y = _routed(trace, s, moe, h=h, probs=probs, chosen=chosen)
        trace.phase = "finish"
        both = trace.add(x, y)
        return both if shared is None else trace.add(both, shared, holds=[x, y])


def _shared(trace: Trace, s: Sizes, moe: MoEConfig, h: TracedTensor) -> TracedTensor:
    trace.phase = "shared"
    with trace.again(s.recomputes(Recompute.shared)):
        out = swiglu(trace, s, h, width=moe.shared_ffn_hidden_size // s.layout.tp, again=False)
        if not moe.shared_gate:
            return out
        (gate,) = trace.op([h], [s.local * s.size], [h], weight=s.weight(1))
        (gate,) = trace.op([gate], [gate.bytes], [0])
        return trace.op([gate, out], [out.bytes], [gate, out])[0]


def _route(
    trace: Trace, s: Sizes, moe: MoEConfig, h: TracedTensor
) -> tuple[TracedTensor, TracedTensor]:
    """Probabilities and the experts they belong to: 4 and 8 bytes per token and expert of it."""
    trace.phase = "route"
    scores = 4 * s.local * moe.num_experts
    picked = 4 * s.local * moe.top_k
    weight = 4 * s.model.hidden_size * moe.num_experts
    wide = cast(trace, h, h.bytes // s.size * 4)
    if moe.jitter_eps:
        (wide,) = trace.op([wide], [wide.bytes], keeps=wide.bytes, kernels=2)
    (logits,) = trace.op(
        [wide], [scores], [wide], keeps=0 if s.size == 4 else weight, weight=weight, kernels=2
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
    """What the experts make of the tokens; a token's sums over its experts are in fp32."""
    r = _routed_sizes(s, moe)
    trace.phase = "preprocess"
    # padded to capacity, one more place takes what has no row
    of_rows = 8 * (r.sent + 1 if moe.pad_to_capacity else r.choices)
    sizes = of_rows, 8 * r.choices, r.choices if r.drops else 0, 4 * r.experts
    token_of_row, row_of, kept, ends = trace.op([], sizes, holds=[chosen], kernels=8)
    places = token_of_row, row_of, kept
    gathers = moe.dispatcher is DispatcherKind.all_gather
    through = _through_gathered_tokens if gathers else _through_exchange
    return through(trace, s, moe, r=r, h=h, probs=probs, places=places, ends=ends)


@dataclass(frozen=True, slots=True)
class _Routed:
    """Sizes of the routed part of a layer. A row travels to each etp rank of its expert."""

    ranks: int  # P, which have all experts between them; 0: nothing is exchanged
    # rows that the tokens seen here ask for, of their experts or of each part of these
    choices: int
    drops: bool  # some of them have no row here
    sent: int  # rows that leave this rank, or are picked out of gathered tokens
    rows: int  # of this rank's experts
    experts: int  # on this rank


def _routed_sizes(s: Sizes, moe: MoEConfig) -> _Routed:
    ranks = s.layout.ep * s.layout.expert_tp
    experts = moe.num_experts // s.layout.ep
    exchanges = ranks > 1 or moe.dispatcher not in (DispatcherKind.auto, DispatcherKind.local)
    mean = s.local * moe.top_k * s.layout.expert_tp
    bound = capacity_load(s.run)
    rows = round(mean * busiest_load(s.run)) if exchanges or moe.pad_to_capacity else mean
    if moe.dispatcher is DispatcherKind.all_gather:
        return _Routed(
            ranks, ranks * s.local * moe.top_k, True, sent=rows, rows=rows, experts=experts
        )
    most = mean if bound is None else round(mean * bound)
    sent = most if moe.pad_to_capacity else min(mean, most) if exchanges else mean
    return _Routed(
        ranks if exchanges else 0, mean, bound is not None, sent=sent, rows=rows, experts=experts
    )


def _through_exchange(
    trace: Trace,
    s: Sizes,
    moe: MoEConfig,
    r: _Routed,
    h: TracedTensor,
    probs: TracedTensor,
    places: Sequence[TracedTensor],
    ends: TracedTensor,
) -> TracedTensor:
    """On this rank alone, or to the experts' ranks and back, with rows sorted by expert."""
    token_of_row, row_of, kept = places
    row = s.model.hidden_size * s.size
    orders = trace.op([], [8 * r.rows, 8 * r.rows]) if r.ranks else ()
    trace.phase = "dispatch"
    (x,) = trace.op([h], [r.sent * row], [row_of, kept])
    if orders:
        (x,) = trace.op([x], [r.rows * row])
        (x,) = trace.op([x], [r.rows * row], [orders[1]])
    y = made = _experts(trace, s, moe, r=r, x=x, ends=ends)
    trace.phase = "combine"
    if orders:
        (y,) = trace.op([y], [r.rows * row], [orders[0]])
        (y,) = trace.op([y], [r.sent * row])
    etp = s.layout.expert_tp
    if etp > 1:
        (probs,) = trace.op([probs], [etp * probs.bytes])
    saved = [y, probs, token_of_row, row_of, kept]
    return trace.op([y, probs], [s.stream], saved, holds=[made])[0]


def _through_gathered_tokens(
    trace: Trace,
    s: Sizes,
    moe: MoEConfig,
    r: _Routed,
    h: TracedTensor,
    probs: TracedTensor,
    places: Sequence[TracedTensor],
    ends: TracedTensor,
) -> TracedTensor:
    """Rows are picked out of the tokens of all ranks, and each rank's sums for all tokens are
    scattered in fp32.
    """
    token_of_row, row_of, kept = places
    gathered = r.ranks * s.stream
    summing = _sums_scattered(s, r.ranks)
    trace.phase = "dispatch"
    (x,) = trace.op(
        [h],
        [r.rows * s.model.hidden_size * s.size],
        [row_of, kept],
        scratch=(gathered, summing),
        kernels=2,
    )
    y = _experts(trace, s, moe, r=r, x=x, ends=ends)
    trace.phase = "combine"
    keeps = 4 * r.choices
    scratch = (summing, gathered)
    saved = [y, token_of_row, row_of, kept]
    return trace.op([y, probs], [s.stream], saved, keeps=keeps, scratch=scratch, kernels=4)[0]


def _sums_scattered(s: Sizes, ranks: int) -> int:
    """fp32 sums for tokens of so many ranks, and this rank's share before it is narrowed."""
    return (ranks + 1) * s.local * s.model.hidden_size * 4 - s.stream


def _experts(
    trace: Trace, s: Sizes, moe: MoEConfig, r: _Routed, x: TracedTensor, ends: TracedTensor
) -> TracedTensor:
    """Grouped products, in 1/etp of the width."""
    trace.phase = "experts"
    width = moe.ffn_hidden_size // s.layout.expert_tp
    weight = r.experts * s.weight(width)
    (up,) = trace.op(
        [x],
        [2 * r.rows * width * s.size],
        [x, ends],
        weight=2 * weight,
        added=s.added,
        deferred=s.deferred(2 * weight),
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
    )[0]
