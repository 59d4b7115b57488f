"""Cross-entropy over logits, which are read once for the statistics and once to become their
gradient.

One program per row keeps a running maximum and a sum relative to it (online softmax, arXiv
1805.02867) in fp32, per column lane; lanes are merged at the end, so every sum has a fixed order.

Shapes: C tokens, V rows of the vocabulary on this rank. In kernels: L lanes that each add up W
neighbouring logits at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of, cdiv

WIDTH = 8  # neighbouring logits: 16 bytes of bf16, one load of a thread
COLUMNS = 512
BLOCK = 4096  # logits per program of `into_gradient`


def statistics(logits_CV: Tensor, row_C: Tensor) -> Tensor:
    """Return the largest logit, the sum of exponentials relative to it, and the logit of `row_C` (0
    outside [0, V)): [3, C] fp32.

    The logits of a token are contiguous; tokens may be strided. A NaN logit makes the sum NaN.
    """
    tokens, vocabulary = logits_CV.shape
    assert logits_CV.stride(1) == 1, "the logits of a token must be contiguous"
    out_3C = torch.empty(3, tokens, dtype=torch.float32, device=logits_CV.device)
    columns = min(COLUMNS, block_of(cdiv(vocabulary, WIDTH)))
    _statistics[(tokens,)](
        logits=logits_CV,
        rows=row_C.contiguous(),
        out=out_3C,
        tokens=tokens,
        vocabulary=vocabulary,
        stride=logits_CV.stride(0),
        L=columns,
        W=WIDTH,
        num_warps=8,
    )
    return out_3C


def into_gradient(logits_CV: Tensor, row_C: Tensor, lse_C: Tensor, weight_C: Tensor) -> None:
    """Replace logits by (exp(logit - lse) - one at `row_C`) · weight: fp32, rounded once, in place.

    `lse_C` and `weight_C` are fp32. Nothing is subtracted for a `row_C` outside [0, V).
    """
    tokens, vocabulary = logits_CV.shape
    assert logits_CV.stride(1) == 1, "the logits of a token must be contiguous"
    block = min(BLOCK, block_of(vocabulary))
    grid = tokens, cdiv(vocabulary, block)
    _into_gradient[grid](
        logits=logits_CV,
        rows=row_C.contiguous(),
        lses=lse_C.contiguous(),
        weights=weight_C.contiguous(),
        vocabulary=vocabulary,
        stride=logits_CV.stride(0),
        BLOCK=block,
        num_warps=8,
    )


@jit
def _statistics(
    logits: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    tokens: int,
    vocabulary: int,
    stride: int,
    L: tl.constexpr,
    W: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    own = logits + token * stride
    within_LW = tl.arange(0, L)[:, None] * W + tl.arange(0, W)[None, :]
    # finite: the difference of two infinities is no number
    largest_L = tl.full((L,), -3.4e38, tl.float32)
    sums_L = tl.zeros((L,), tl.float32)
    for start in range(0, vocabulary, L * W):
        column_LW = start + within_LW
        x_LW = tl.load(own + column_LW, mask=column_LW < vocabulary, other=float("-inf")).to(
            tl.float32
        )
        before_L = largest_L
        largest_L = tl.maximum(before_L, tl.max(x_LW, axis=1))
        sums_L = sums_L * tl.exp(before_L - largest_L) + tl.sum(
            tl.exp(x_LW - largest_L[:, None]), axis=1
        )
    largest = tl.max(largest_L, axis=0)
    row = tl.load(rows + token)
    label = tl.load(own + row, mask=(row >= 0) & (row < vocabulary), other=0.0).to(tl.float32)
    tl.store(out + token, largest)
    tl.store(out + tokens + token, tl.sum(sums_L * tl.exp(largest_L - largest), axis=0))
    tl.store(out + 2 * tokens + token, label)


@jit
def _into_gradient(
    logits: tl.tensor,
    rows: tl.tensor,
    lses: tl.tensor,
    weights: tl.tensor,
    vocabulary: int,
    stride: int,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + token * stride + column
    inside = column < vocabulary
    row = tl.load(rows + token)
    lse = tl.load(lses + token)
    weight = tl.load(weights + token)
    probs = tl.exp(tl.load(place, mask=inside, other=0.0).to(tl.float32) - lse)
    gradient = (probs - (column == row).to(tl.float32)) * weight
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=inside)
