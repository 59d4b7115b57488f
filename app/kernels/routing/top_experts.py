"""Top-k experts by score: K rounds of finding the maximum in registers, without a sort.

Shapes: T tokens · E experts · K experts per token. In kernels: B tokens of a program, E padded to a
power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.kernels.common import jit, tl
from app.kernels.tiling import block_of, cdiv

VALUES = 1024  # scores of one program


def top_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return the ids of the `top_k` largest scores of each token, ascending: int64 [T, K]. Among
    equals the lowest id wins.

    NaN counts as -inf. The ids differ from each other even if fewer scores are above -inf.
    """
    tokens, experts = scores_TE.shape
    found_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=scores_TE.device)
    padded = block_of(experts)
    block = max(1, VALUES // padded)
    _top[(cdiv(tokens, block),)](
        scores_TE.contiguous(),
        found_TK,
        tokens,
        experts=experts,
        K=top_k,
        B=block,
        E=padded,
        num_warps=4,
    )
    return found_TK


@jit
def _top(
    scores: tl.tensor,
    found: tl.tensor,
    tokens: int,
    experts: int,
    K: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
) -> None:
    token = tl.program_id(0) * B + tl.arange(0, B).to(tl.int64)[:, None]
    expert = tl.arange(0, E)[None, :]
    real = (token < tokens) & (expert < experts)
    score = tl.load(scores + token * experts + expert, mask=real, other=0.0).to(tl.float32)
    score = tl.where(score == score, score + 0.0, float("-inf"))  # NaN to -inf; -0 to 0
    # one integer orders by score, then by lower id: as integers, negative floats are in reverse
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    nothing = -(2**63)  # below the key of -inf
    key = tl.where(real, bits.to(tl.int64) * 2**32 + (E - 1 - expert), nothing)
    chosen = tl.zeros((B, E), tl.int32)
    for _ in tl.static_range(K):
        best = key == tl.max(key, axis=1)[:, None]
        chosen = tl.where(best, 1, chosen)
        key = tl.where(best, nothing, key)
    place = token * K + tl.cumsum(chosen, axis=1) - 1
    tl.store(
        found + place, (expert + tl.zeros_like(chosen)).to(tl.int64), mask=real & (chosen == 1)
    )
