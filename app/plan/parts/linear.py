"""Norms, linear layers and SwiGLU.

With tp > 1 the residual stream, norms, router and dispatch have 1/tp of the tokens (sequence
parallelism, Korthikanti et al. 2022); attention and feed-forward see all of them in 1/tp of the
width. A column-parallel linear layer all-gathers the tokens first, saves only its own part of them,
and gathers again in backward for its weight gradient. Sizes of weights and of GEMM outputs come
from `app.plan.model` alone. All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.choices import Recompute
from app.plan.model.mlp import MlpWeights
from app.plan.model.weight import Adapter, Weight
from app.plan.parts.fp8 import RECIPES, Fp8Work, fp8_copy
from app.plan.parts.trace import Trace, Work

# passes of torch's kernels that add a bias to rows, and sum up rows for its gradient (bench/LOG.md)
BIAS_MOVES = 3.6, 1.45
# what GEMMs with matrices of adapters take beyond other GEMMs, as they are bound by memory; the
# gradients of an input with adapters are added up
FIRST_MOVES, SECOND_MOVES = (0.3, 2.1), (0.75, 0.6)


def norm(t: Trace, x: int, *, rerun: bool = False, saved: bool = True) -> int:
    """RMSNorm of `x` bytes, which saves its input; `saved`: no other operation has saved it.

    One backward kernel also adds the gradient of the residual.
    """
    return t.op(Work.norm, x, x, saves=x if saved else 0, rerun=rerun)


def column_parallel(
    t: Trace,
    x: int,
    weight: Weight,
    *,
    saved: bool = True,
    stored: bool = False,
    shared: bool = False,
    stride: int | None = None,
) -> int:
    """Linear layer of all tokens, gathered over tp; of a rank's own ones if the weight is whole.

    saved: its input stays for the weight gradient of a trained weight, and no other operation has
    saved it. stored: the weight gradient is stored even if GEMMs could accumulate it. shared: a
    GEMM before has kept the same input until its own weight gradient. stride: elements from one
    row of the output to the next; None: its width.
    """
    gathers = weight.tp is not None and t.sizes.layout.tp > 1
    saved = saved and not shared
    return _linear(
        t, x, weight, saved=saved, gathers=gathers, stored=stored, shared=shared, stride=stride
    )


def row_parallel(t: Trace, x: int, weight: Weight, *, saved: bool = True) -> int:
    """Linear layer of part of the width, reduce-scattered over the tokens."""
    return scattered(t, _linear(t, x, weight, saved=saved, gathers=False))


def _linear(
    t: Trace,
    x: int,
    weight: Weight,
    *,
    saved: bool,
    gathers: bool,
    stored: bool = False,
    shared: bool = False,
    stride: int | None = None,
) -> int:
    s = t.sizes
    made, taken = s.shape(weight)
    whole = s.layout.tp * x if gathers else 0
    rows = (whole or x) // (taken * s.size)
    out = rows * (stride or made) * s.size
    fp8, launches, keeps, waits = None, 0, x if saved and weight.trained else 0, out
    waits += 0 if shared else x
    again = weight.trained  # gathers the tokens for the weight gradient
    scratch = whole, (1 + again) * whole
    if s.in_fp8 is not None:
        # backward quantizes gathered tokens again; of others the FP8 copy is saved
        given, back = fp8_copy(s.in_fp8, rows * taken), fp8_copy(s.in_fp8, rows * made)
        fp8 = Fp8Work(s.in_fp8, rows * taken, rows * made + (rows * taken if gathers else 0))
        launches, scratch = (
            RECIPES[s.in_fp8].launches,
            (whole + given, (1 + again) * whole + 2 * back),
        )
        keeps = keeps if gathers else given * weight.trained
        waits = (x if gathers else given) + back
    scratch = scratch[0] + s.restored(weight), scratch[1] + s.restored(weight)
    t.op(
        Work.gemm,
        x,
        out,
        saves=keeps,
        weight=s.weight(weight),
        stored=not s.splits and (stored or not s.fused),
        waits=waits,
        deferred=whole + (0 if s.fused else s.weight(weight)),
        scratch=scratch,
        kernels=1 + launches + gathers,
        flops=2 * rows * made * taken,
        fp8=fp8,
        sends=s.tp_sends(x, forward=1, backward=1 + weight.trained) if gathers else None,
        trained=weight.trained,
    )
    return adapters(t, x, out, weight, saved=saved, gathers=gathers) if weight.adapters else out


def adapters(t: Trace, x: int, out: int, weight: Weight, *, saved: bool, gathers: bool) -> int:
    """GEMMs of a rank's own tokens with the first matrices of all adapters of a weight, and of
    gathered ones with the second, whose outputs are added in place (`app.model.lora`).
    """
    s, size = t.sizes, t.sizes.size
    inputs = s.shape(weight)[-1]
    first = sum(s.weight(each.a) for each in weight.adapters)
    second = sum(s.weight(each.b) for each in weight.adapters)
    width = first // (inputs * size)  # ranks of all adapters together
    tokens = x // (inputs * size)
    own = tokens * width * size
    whole = own * (s.layout.tp if gathers else 1)
    joined = first if len(weight.adapters) > 1 else 0
    scratch, kernels = (joined, joined), 1 + bool(joined) + gathers
    if s.run.lora.dropout:  # what is kept of the input, or of its gradients, beside the outputs
        joined, count = 0, len(weight.adapters)
        scratch, kernels = (out + x, out + x * min(count + 1, 3)), 2 * count + 2 + gathers
    sends = s.tp_sends(own, forward=1, backward=1) if gathers else None
    t.op(Work.gemm, x, whole, x if saved else 0, weight=first, stored=True,
         scratch=scratch, flops=2 * tokens * width * inputs, sends=sends,
         kernels=kernels)  # fmt: skip
    made = s.shape(weight)[0]
    both, scratch, copies = second_matrices(weight.adapters, made * width * size, second)
    flops = 2 * (whole // (width * size)) * (second // size)  # without those by zeros
    t.op(Work.gemm, whole, out, whole + joined, weight=both, stored=True, scratch=scratch,
         flops=flops, passes=True, kernels=1 + copies)  # fmt: skip
    t.op(Work.other, x, x, passes=True, kernels=0, moves=FIRST_MOVES)
    t.op(Work.other, out, out, passes=True, kernels=0, moves=SECOND_MOVES)
    return out


def second_matrices(
    adapters: Sequence[Adapter], whole: int, second: int
) -> tuple[int, tuple[int, int], int]:
    """Return the bytes of the matrix that a GEMM takes for the second matrices of adapters, memory
    of it in forward, of it and the matrices' gradients in backward, and kernels that fill it.

    `whole`: bytes of all outputs' ranks. `second`: of the matrices.
    """
    if len(adapters) == 1 and adapters[0].of == 1:
        return second, (0, 0), 0
    return whole, (whole, whole + second), 1 + len(adapters)


def scattered(t: Trace, whole: int) -> int:
    """Reduce-scatter of partial sums to each tensor-parallel rank's tokens."""
    parts = t.sizes.layout.tp
    if parts == 1:
        return whole
    sends = t.sizes.tp_sends(whole // parts, forward=1, backward=1)
    return t.op(Work.other, whole, whole // parts, sends=sends)


def feed_forward(
    t: Trace, x: int, weights: MlpWeights, *, saved: bool, part: Recompute | None
) -> int:
    """Feed-forward; `part` names the recomputation of its activation."""
    up = column_parallel(t, x, weights.w_up, saved=saved)
    bias(t, up, weights.b_up)
    again = part is not None and t.reruns(part)
    made = up if weights.w_up.gate_up is None else up // 2
    inner = t.op(Work.activation, up, made, saves=up, rerun=again)
    return bias(t, row_parallel(t, inner, weights.w_down, saved=not again), weights.b_down)


def bias(t: Trace, x: int, weight: Weight | None) -> int:
    """Add a bias, if there is one, in place."""
    if weight is None:
        return x
    moves = BIAS_MOVES[0], BIAS_MOVES[1] * weight.trained
    return t.op(Work.other, x, x, passes=True, moves=moves)
