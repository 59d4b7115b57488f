"""Mixture-of-experts bodies: router, shared expert, dispatch, grouped GEMMs, combine.

The operations of `app.moe`. All sizes are bytes.

Shapes: T tokens on one rank, D hidden, E experts, K per token, R rows: dispatched tokens.
"""

from __future__ import annotations

from app.choices import Dtype, Recompute, Score
from app.config import MoEConfig
from app.kernels.tiling import ONES, PARTS
from app.plan.model.experts import MoEBodyWeights, RouterWeights
from app.plan.model.weight import Weight
from app.plan.parts.dispatch_record import PlannedDispatcher, Tokens
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.fp8 import SCALE, Fp8Work
from app.plan.parts.linear import (
    adapters,
    column_parallel,
    feed_forward,
    norm,
    second_matrices,
)
from app.plan.parts.trace import Trace, Work
from app.plan.phases import PhaseName


def moe_body(t: Trace, x: int, weights: MoEBodyWeights) -> None:
    """Layer after attention (`MoEBody`), from the residual stream to its sum."""
    s, moe = t.sizes, t.sizes.model.moe
    dispatcher = run_dispatcher(s.run, s.layout)
    assert moe is not None and dispatcher is not None
    with t.rerun(t.reruns(Recompute.moe), keeps=x):
        t.phase = PhaseName.norm
        h = norm(t, x, rerun=t.reruns(Recompute.norm))
        # the gradients of the readers of the norm's output are added up in backward
        t.op(Work.other, h, h * (1 + (weights.shared is not None)), kernels=0)
        if weights.shared is not None:
            t.phase = PhaseName.shared
            with t.rerun(t.reruns(Recompute.shared), keeps=0):
                out = feed_forward(t, h, weights.shared, saved=False, part=None)
                if weights.shared_gate is not None:
                    gate = column_parallel(t, h, weights.shared_gate, saved=False)
                    t.op(Work.other, gate, gate, gate)
                    t.op(Work.other, gate + out, out, out)
        t.phase = PhaseName.route
        route(t, moe, h, weights.router)
        routed(t, dispatcher, weights)
        t.phase = PhaseName.finish
        t.add(x)
        if weights.shared is not None:
            t.add(x)


def route(t: Trace, moe: MoEConfig, h: int, weights: RouterWeights) -> None:
    """Scores of all experts in fp32, choice of the best, and losses that balance the load."""
    s = t.sizes
    weight = s.weight(weights.weight)
    experts, width = s.shape(weights.weight)
    scores = 4 * s.local * experts
    picked = 4 * s.local * moe.top_k
    flops = 2 * s.local * experts * width
    keeps = 0 if t.reruns(Recompute.norm) else h
    if s.run.precision.params is Dtype.bfloat16 and not moe.jitter_eps:
        # the fp32 gradient is split into three bf16 parts; the weight's gradients are fp32
        scratch = (0, PARTS * (scores // 2 + 4 * weight))
    else:
        # tokens in fp32, and noise as large
        wide = h // s.size * 4
        keeps += (wide if wide > h else 0) + (wide if moe.jitter_eps else 0)
        scratch = (0, wide)
        t.op(Work.other, h, wide, kernels=1 + 2 * bool(moe.jitter_eps))
    t.op(
        Work.router_matmul,
        h,
        scores,
        keeps,
        weight=weight,
        scratch=scratch,
        kernels=2,
        flops=flops,
    )
    if weights.weight.adapters:
        narrow = s.local * experts * s.size
        adapters(t, h, narrow, weights.weight, saved=False, gathers=False)  # the router saves h
        t.op(Work.other, narrow, scores, passes=True, kernels=3)
    if weights.bias is not None:
        t.op(Work.other, scores, scores, passes=True)
    losses = bool(moe.aux_loss_coeff) + bool(moe.z_loss_coeff)
    # scores of the choice, then those of the losses; probabilities and ids of the chosen experts
    t.op(Work.other, scores, scores, scores * (1 + bool(moe.aux_loss_coeff)), kernels=2)
    divides = moe.normalizes_sigmoids or moe.score is Score.softmax_bias
    extra = 3 * divides + 12 * (moe.capacity_factor is not None)
    t.op(Work.other, picked, 3 * picked, 3 * picked, kernels=2 + extra)
    for _ in range(losses):
        t.op(Work.other, scores, 4, kernels=6)


def routed(t: Trace, dispatcher: PlannedDispatcher, weights: MoEBodyWeights) -> None:
    """Dispatch, the experts' grouped GEMMs, and combine, by the run's dispatcher."""
    s = t.sizes
    width = s.model.hidden_size
    in_fp8 = width + SCALE if s.experts_in_fp8 and dispatcher.quantises else 0
    tokens = Tokens(s.local, width, s.size, in_fp8=in_fp8)
    t.phase = PhaseName.preprocess
    dispatcher.preprocess(t, tokens)
    t.phase = PhaseName.dispatch
    x = dispatcher.dispatch(t, tokens)
    t.phase = PhaseName.experts
    # below the capacity if that leaves rows empty, without telling the host how many
    filled = round(dispatcher.mean_rows(s.local) * s.load)
    paged = dispatcher.paged_buffers and not t.open
    up = grouped(t, dispatcher, x, weights.experts.w_up, filled=filled, saved=not paged)
    bias = weights.experts.b_up, weights.experts.b_down
    expert_bias(t, bias[0], up, width=weights.experts.w_up)
    again = t.reruns(Recompute.experts_act)
    used = min(1.0, filled * tokens.row / x)
    half = up // 2
    copies = (half // s.size, up // s.size) if s.experts_in_fp8 else (0, 0)
    saved, back = (0, up) if paged else (up, 0)
    t.op(Work.activation, up, half, saved, restores=back, rerun=again, scratch=copies, used=used)
    out = grouped(
        t,
        dispatcher,
        half,
        weights.experts.w_down,
        filled=filled,
        saved=not (paged or again),
        ready=True,
        # the dispatch's record holds the tokens, saved or not
        alive=0 if weights.experts.w_up.keeps_input else x,
    )
    expert_bias(t, bias[1], out, width=weights.experts.w_down)
    if paged:  # copies to pages and back
        t.op(Work.other, 0, 0, kernels=6 if again else 8)
    t.phase = PhaseName.combine
    dispatcher.combine(t, tokens, saved=not paged)


def expert_bias(t: Trace, bias: Weight | None, rows: int, *, width: Weight) -> None:
    """Bias of each row's expert, added in place; its gradient is a grouped GEMM with ones.

    width: the matrix before it, whose outputs `rows` bytes hold.
    """
    if bias is None:
        return
    s = t.sizes
    made, held = s.shape(width)[-1], s.shape(bias)[-1]
    count = rows // (made * s.size)
    copy = count * held * s.size  # of the bias of each row's expert
    back = count * ONES * s.size + ONES * s.weight(bias) + (copy if held < made else 0)
    scratch = 16 * count + copy, back
    t.op(Work.other, rows, rows, weight=s.weight(bias), stored=True, scratch=scratch,
         passes=True, kernels=5, trained=bias.trained)  # fmt: skip


def grouped(
    t: Trace,
    dispatcher: PlannedDispatcher,
    x: int,
    weight: Weight,
    *,
    filled: int,
    saved: bool,
    ready: bool = False,
    alive: int = 0,
) -> int:
    """Grouped GEMM of rows with their expert's weight, or this rank's etp part of it.

    filled: rows with a token. ready: the kernel that produced the rows has also written their FP8
    copies, if any. alive: bytes that stay while its forward runs and are not saved.
    """
    s = t.sizes
    _, taken, made = s.shape(weight)
    rows = x // (taken * s.size)
    out = rows * made * s.size
    paged = dispatcher.paged_buffers
    scratch, launches, fp8 = (0, 0), 1, None
    if s.experts_in_fp8:  # not together with clones
        fp8 = Fp8Work(None, rows * taken, rows * made)
        scratch = rows * taken, rows * made
        launches += not (ready or dispatcher.quantises)
    transfer = dispatcher.clone_transfer(taken * made, s.size)
    if transfer is not None:
        scratch, launches = transfer.scratch, launches + transfer.kernels
    scratch = scratch[0] + alive + s.restored(weight), scratch[1] + s.restored(weight)
    t.op(
        Work.grouped,
        x,
        out,
        x if saved and weight.trained else 0,
        restores=x if paged and weight.trained and not t.open else 0,
        weight=s.weight(weight),
        stored=not (s.fused or s.splits),
        waits=0 if paged else x + out,
        deferred=(x + out if paged else 0) + (0 if s.fused else s.weight(weight)),
        scratch=scratch,
        kernels=launches,
        flops=2 * filled * taken * made,
        fp8=fp8,
        sends=None if transfer is None else transfer.sends,
        used=min(1.0, filled / rows),
        trained=weight.trained,
    )
    if weight.adapters:
        grouped_adapters(t, x, out, weight, filled=filled, saved=saved)
    return out


def grouped_adapters(
    t: Trace, x: int, out: int, weight: Weight, *, filled: int, saved: bool
) -> None:
    """Grouped GEMMs with the adapters of a weight of experts, added in place."""
    s, size = t.sizes, t.sizes.size
    first = sum(s.weight(each.a) for each in weight.adapters)
    second = sum(s.weight(each.b) for each in weight.adapters)
    experts, inputs, outputs = s.shape(weight)
    width = first // (experts * inputs * size)  # ranks of all adapters together
    rows = x // (inputs * size)
    mid, used = rows * width * size, min(1.0, filled / rows)
    joined = first if len(weight.adapters) > 1 else 0
    t.op(Work.grouped, x, mid, x if saved else 0, weight=first, stored=True, used=used,
         scratch=(joined, joined), flops=2 * filled * width * inputs)  # fmt: skip
    whole = experts * width * outputs * size
    both, (front, back), copies = second_matrices(weight.adapters, whole, second)
    t.op(Work.grouped, mid, out, mid + joined, weight=both, stored=True, used=used,
         scratch=(out + front, back), flops=2 * filled * second // (experts * size), passes=True,
         kernels=2 + copies)  # fmt: skip
