"""Mixture-of-experts bodies as tapes: what `app.moe` does on a GPU, phase by phase. All sizes are bytes.

Shapes: as in `tape_parts`, and E experts, K per token · R rows of the experts of a rank.
"""

from __future__ import annotations

from app.choices import Recompute, Score
from app.config import MoEConfig
from app.plan.flops import busiest_load
from app.plan.tape import Tape, Value
from app.plan.tape_parts import Sizes, activation, cast, norm, swiglu


def moe_body(tape: Tape, s: Sizes, moe: MoEConfig, x: Value) -> Value:
    """Everything in an MoE layer behind attention (`MoEBody`)."""
    with tape.again(s.recomputes(Recompute.moe)):
        tape.phase = "norm"
        with tape.again(s.recomputes(Recompute.norm), discards=True):
            h = norm(tape, x, s.local)
        shared = _shared(tape, s, moe, h) if moe.shared_ffn_hidden_size else None
        probs, chosen = _route(tape, s, moe, h)
        y = _routed(tape, s, moe, h, probs, chosen)
        tape.phase = "finish"
        x = tape.add(x, y)
        return x if shared is None else tape.add(x, shared)


def _shared(tape: Tape, s: Sizes, moe: MoEConfig, h: Value) -> Value:
    tape.phase = "shared"
    with tape.again(s.recomputes(Recompute.shared)):
        out = swiglu(tape, s, h, moe.shared_ffn_hidden_size // s.layout.tp, False)
        if not moe.shared_gate:
            return out
        (gate,) = tape.op([h], [s.local * s.size], [h], weight=s.weight(1))
        (gate,) = tape.op([gate], [gate.bytes], [0])
        return tape.op([gate, out], [out.bytes], [gate, out])[0]


def _route(tape: Tape, s: Sizes, moe: MoEConfig, h: Value) -> tuple[Value, Value]:
    """Probabilities and the experts they belong to: 4 and 8 bytes per token and expert of it."""
    tape.phase = "route"
    scores, picked = 4 * s.local * moe.num_experts, 4 * s.local * moe.top_k
    weight = 4 * s.model.hidden_size * moe.num_experts
    wide = cast(tape, h, h.bytes // s.size * 4)
    (logits,) = tape.op([wide], [scores], [wide], keeps=0 if s.size == 4 else weight, weight=weight, kernels=2)
    after = moe.score is Score.softmax and not moe.pre_softmax
    ranked = logits if after else tape.op([logits], [scores], [0])[0]
    (chosen,) = tape.op([], [2 * picked], holds=[ranked], kernels=4)
    (probs,) = tape.op([ranked], [picked], [ranked, chosen])
    if after:
        (probs,) = tape.op([probs], [picked], [0])
    elif moe.score is Score.sigmoid and moe.top_k > 1:
        (probs,) = tape.op([probs], [picked], [probs], keeps=4 * s.local, kernels=3)
    if moe.routed_scale is not None:
        (probs,) = tape.op([probs], [picked])
    _router_losses(tape, s, moe, logits)
    return probs, chosen


def _router_losses(tape: Tape, s: Sizes, moe: MoEConfig, logits: Value) -> None:
    if moe.aux_loss_coeff:
        (scores,) = tape.op([logits], [logits.bytes], [0])
        if moe.score is Score.sigmoid:
            (scores,) = tape.op([scores], [logits.bytes], [scores], keeps=4 * s.local, kernels=3)
        tape.op([scores], [4], keeps=8 * moe.num_experts, kernels=10)
    if moe.z_loss_coeff:
        (summed,) = tape.op([logits], [4 * s.local], [logits, 0])
        tape.op([summed], [4], [summed], kernels=3)


def _routed(tape: Tape, s: Sizes, moe: MoEConfig, h: Value, probs: Value, chosen: Value) -> Value:
    """What the experts make of the tokens; the token's sums over its experts are in fp32."""
    ep, model, sent = s.layout.ep, s.model, s.local * moe.top_k
    rows = round(sent * busiest_load(s.run))
    count = moe.num_experts // ep
    tape.phase = "preprocess"
    places = tape.op([], [8 * sent, 8 * sent, 4 * count, *([8 * rows, 8 * rows] if ep > 1 else [])], holds=[chosen], kernels=8)
    token_of_row, row_of, ends = places[:3]
    summing = 2 * s.local * model.hidden_size * 4 + s.stream
    row = model.hidden_size * s.size
    tape.phase = "dispatch"
    (x,) = tape.op([h], [sent * row], [row_of], scratch=(0, summing))
    if ep > 1:
        (x,) = tape.op([x], [rows * row])
        (x,) = tape.op([x], [rows * row], [places[4]])
    y = _experts(tape, s, moe, x, ends)
    tape.phase = "combine"
    if ep > 1:
        (y,) = tape.op([y], [rows * row], [places[3]])
        (y,) = tape.op([y], [sent * row])
    saved = [y, probs, token_of_row, row_of]
    return tape.op([y, probs], [s.stream], saved, scratch=(summing, summing), kernels=4 * moe.top_k)[0]


def _experts(tape: Tape, s: Sizes, moe: MoEConfig, x: Value, ends: Value) -> Value:
    """Grouped products; with etp > 1 on the rows of the whole group, in a part of the width."""
    tape.phase = "experts"
    etp, came = s.layout.expert_tp, x.bytes
    if etp > 1:
        (x,) = tape.op([x], [etp * came])
    width, rows = moe.ffn_hidden_size // etp, x.bytes // (s.model.hidden_size * s.size)
    weight = moe.num_experts // s.layout.ep * s.weight(width)
    (up,) = tape.op([x], [2 * rows * width * s.size], [x, ends], weight=2 * weight, waits=True)
    inner = activation(tape, up, s.recomputes(Recompute.experts_act))
    (y,) = tape.op([inner], [x.bytes], [inner, ends], weight=weight, waits=True)
    return tape.op([y], [came])[0] if etp > 1 else y
