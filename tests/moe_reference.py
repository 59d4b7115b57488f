"""A mixture-of-experts layer written the slow, obvious way, in any dtype: the tests' yardstick.

Shapes: T tokens · E experts · D width · F hidden width of an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route_token(
    logits_E: Tensor,
    top_k: int,
    score: str = "softmax",
    pre_softmax: bool = False,
    bias_E: Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    group_best: int | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Probabilities of one token, [E], zero for experts not chosen. As `app.moe.router.route`."""
    if score == "sigmoid":
        scores_E = logits_E.sigmoid()
        ranked = (scores_E if bias_E is None else scores_E + bias_E).tolist()
    else:
        scores_E = logits_E.softmax(0) if pre_softmax else logits_E
        ranked = scores_E.tolist()
    allowed = set(range(len(ranked)))
    if groups is not None and topk_groups is not None:
        size = len(ranked) // groups
        best = group_best or top_k // topk_groups
        value = [sum(sorted(ranked[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        kept = sorted(range(groups), key=value.__getitem__)[-topk_groups:]
        allowed = {g * size + i for g in kept for i in range(size)}
    chosen = sorted(sorted(allowed, key=ranked.__getitem__)[-top_k:])
    picked = scores_E[chosen]
    if score == "softmax" and not pre_softmax:
        picked = picked.softmax(0)
    if score == "sigmoid" and top_k > 1:
        picked = picked / picked.sum()
    return (
        torch.stack(
            [
                picked[chosen.index(e)] if e in chosen else picked.new_zeros(())
                for e in range(len(ranked))
            ]
        )
        * scale
    )


def expert(x_TD: Tensor, w1_D2F: Tensor, w2_FD: Tensor) -> Tensor:
    """SwiGLU feed-forward of one expert, gate in the first half of w1: [T, D]."""
    gate_TF, up_TF = (x_TD @ w1_D2F).chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF) @ w2_FD


def moe_layer(x_TD: Tensor, probs_TE: Tensor, w1_ED2F: Tensor, w2_EFD: Tensor) -> Tensor:
    """Σ_e probs[t, e] · expert_e(x[t]), each expert seeing only its tokens: [T, D]."""
    out_TD = torch.zeros_like(x_TD)
    for e in range(probs_TE.shape[1]):
        mine_T = probs_TE[:, e] != 0
        out_TD[mine_T] += probs_TE[mine_T, e, None] * expert(x_TD[mine_T], w1_ED2F[e], w2_EFD[e])
    return out_TD
