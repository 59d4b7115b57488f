"""Router: choice of experts per token with probabilities, auxiliary losses, and balancing bias.

Shapes: T tokens, or B sequences of S tokens · E experts · K experts per token (top_k), R = T·K · G
groups of X = E/G experts. Scores, probabilities and losses are computed in fp32 (fp64 for fp64
logits). Nothing here synchronizes with the device or depends on the order of atomic additions, so
all of it can be captured in a CUDA graph and is bitwise reproducible.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.choices import Score
from app.errors import nearest_divisors
from app.kernels.common import usable
from app.kernels.routing.top_experts import top_experts

LEAST_SUM = 1e-12  # by which chosen softmax scores are divided (moe_norm_min of ERNIE 4.5)
TINY = 1e-20  # keeps the normalisation of scores finite when every one of them underflows


def route(
    logits_TE: Tensor,
    top_k: int,
    score: Score | str = Score.softmax,
    pre_softmax: bool = False,
    bias_E: Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    scale: float | None = None,
    group_best: int | None = None,
    norm_topk_prob: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `choose` in dense form: probabilities [T, E] in the logits' dtype, zero elsewhere, and
    the map of chosen experts [T, E] (bool). For other programs, and for tests that compare with
    theirs.
    """
    probs_TK, experts_TK = choose(
        logits_TE,
        top_k,
        score,
        pre_softmax=pre_softmax,
        bias_E=bias_E,
        groups=groups,
        topk_groups=topk_groups,
        scale=scale,
        group_best=group_best,
        norm_topk_prob=norm_topk_prob,
    )
    probs_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, probs_TK.to(logits_TE.dtype))
    return probs_TE, torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, experts_TK, True)


def choose(
    logits_TE: Tensor,
    top_k: int,
    score: Score | str = Score.softmax,
    pre_softmax: bool = False,
    bias_E: Tensor | None = None,
    groups: int | None = None,
    topk_groups: int | None = None,
    scale: float | None = None,
    forced_TK: Tensor | None = None,
    group_best: int | None = None,
    norm_topk_prob: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return probabilities [T, K] fp32 and ids [T, K] int64 of each token's top_k experts, ids
    ascending.

    softmax: over the chosen logits; with `pre_softmax` over all logits before choosing, not
    renormalised. sigmoid: of each logit, divided by the sum over the chosen ones if
    `norm_topk_prob`; None means when top_k > 1. softmax_bias: over all logits, divided by the sum
    over the chosen ones. `bias_E` is added to scores for the choice only (loss-free balancing,
    arXiv 2408.15664); softmax ignores it. With `groups`, only the
    `topk_groups` groups with the largest sum of their `group_best` best scores stay eligible: by
    default top_k // topk_groups scores (DeepSeek-V3, arXiv 2412.19437); 1 in DeepSeek-V2 (arXiv
    2405.04434). `scale` multiplies the probabilities. `forced_TK` replaces the choice. Raises
    ValueError for an unknown score or sizes that do not fit together.
    """
    score = _known(score)
    _check_sizes(logits_TE.shape[1], top_k, groups, topk_groups=topk_groups)
    after_choice = score is Score.softmax and not pre_softmax
    scores_TE = _wide(logits_TE) if after_choice else _plain_scores(logits_TE, score)
    ranked_TE = scores_TE.detach()
    if bias_E is not None and score is not Score.softmax:
        ranked_TE = ranked_TE + bias_E
    if groups is not None and topk_groups is not None:
        per_group = group_best or top_k // topk_groups
        ranked_TE = _within_best_groups(ranked_TE, groups, topk_groups, per_group=per_group)
    experts_TK = _top_experts(ranked_TE, top_k) if forced_TK is None else forced_TK
    probs_TK = _weigh(
        scores_TE.gather(1, experts_TK), score, pre_softmax, norm_topk_prob=norm_topk_prob
    )
    return (probs_TK if scale is None else probs_TK * scale), experts_TK


def in_turn(like_TE: Tensor, top_k: int, first: int = 0) -> Tensor:
    """Return experts in round-robin order, for benchmarks with even load: int64 [T, K].

    Token t takes (first + t·K + k) mod E, ascending. Set `first` to the number of choices on the
    ranks before to continue the round across ranks.
    """
    num_tokens, num_experts = like_TE.shape
    turns_R = torch.arange(num_tokens * top_k, device=like_TE.device) + first % num_experts
    return (turns_R % num_experts).view(num_tokens, top_k).sort(dim=1).values


def aux_scores(logits_TE: Tensor, score: Score | str) -> Tensor:
    """Return the scores of the balancing loss, [T, E] fp32: softmax, or normalised sigmoids."""
    score = _known(score)
    scores_TE = _plain_scores(logits_TE, score)
    if score is not Score.sigmoid:
        return scores_TE
    return scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + TINY)


def aux_routing(logits_TE: Tensor, top_k: int, score: Score | str) -> tuple[Tensor, Tensor]:
    """Return `aux_scores` [T, E] and the map of their top_k experts [T, E] (bool) for the balancing
    loss.

    The map ignores bias, groups and drops.
    """
    scores_TE = aux_scores(logits_TE, score)
    experts_TK = _top_experts(scores_TE.detach(), top_k)
    return scores_TE, torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, experts_TK, True)


def aux_loss(
    scores_TE: Tensor,
    tokens_per_expert_E: Tensor,
    top_k: int,
    coeff: float,
    num_tokens: int | Tensor,
) -> Tensor:
    """Return the load-balancing loss of a microbatch, coeff · E · Σ_e f_e · P_e; `coeff` at even
    load.

    f_e is the share of the num_tokens · top_k assignments that expert e received (`map_TE.sum(0)`
    of `aux_routing`), and P_e its mean score over the tokens. `num_tokens` is at least 1, or a
    device scalar. If ranks hold parts of the tokens, counts and `num_tokens` cover all of them and
    scores only the rank's own; the ranks' losses then sum to the whole. Source: GShard (arXiv
    2006.16668) and Switch Transformer (arXiv 2101.03961).
    """
    num_experts = scores_TE.shape[1]
    overlap = (scores_TE.sum(dim=0) * tokens_per_expert_E).sum()
    return overlap * (num_experts * coeff / (top_k * num_tokens * num_tokens))


def sequence_aux_loss(
    scores_BSE: Tensor,
    tokens_per_expert_BE: Tensor,
    top_k: int,
    coeff: float,
    num_tokens: int | Tensor,
) -> Tensor:
    """Return the mean over sequences of each sequence's `aux_loss`: scalar.

    `num_tokens` counts the tokens of a sequence: a number, or [B] on the device. Source:
    DeepSeek-V3 (arXiv 2412.19437).
    """
    num_experts = scores_BSE.shape[2]
    overlap_B = (scores_BSE.sum(dim=1) * tokens_per_expert_BE).sum(dim=1)
    return (overlap_B * (num_experts * coeff / (top_k * num_tokens * num_tokens))).mean()


def z_loss(logits_TE: Tensor, coeff: float, num_tokens: int | None = None) -> Tensor:
    """Return coeff · mean over tokens of logsumexp(logits)² (ST-MoE, arXiv 2202.08906): scalar.

    `num_tokens` counts all tokens if ranks hold parts of them; the ranks' losses then sum to the
    whole.
    """
    squares_T = _wide(logits_TE).logsumexp(dim=-1).square()
    return squares_T.sum() / (num_tokens or len(squares_T)) * coeff


def update_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Return the selection bias after a step: up by `rate` for experts below mean load, down above.

    `counts_E` holds the step's tokens per expert over all ranks that share the bias. Compares E ·
    count with the sum, so integer counts are exact. Source: arXiv 2408.15664.
    """
    return bias_E + rate * torch.sign(counts_E.sum() - counts_E * counts_E.numel())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _plain_scores(logits_TE: Tensor, score: Score) -> Tensor:
    wide_TE = _wide(logits_TE)
    return wide_TE.sigmoid() if score is Score.sigmoid else wide_TE.softmax(dim=-1)


def _top_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    if usable(scores_TE):
        return top_experts(scores_TE, top_k)
    return scores_TE.topk(top_k, dim=-1, sorted=False).indices.sort(dim=-1).values


def _within_best_groups(scores_TE: Tensor, groups: int, topk_groups: int, per_group: int) -> Tensor:
    """Return the scores with -inf outside the best groups."""
    scores_TGX: Tensor = scores_TE.unflatten(1, (groups, -1))
    group_TG = scores_TGX.topk(per_group, dim=-1).values.sum(dim=-1)
    best = group_TG.topk(topk_groups, dim=-1, sorted=False).indices
    outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(1, best, False)
    return scores_TGX.masked_fill(outside_TG[:, :, None], float("-inf")).flatten(1)


def _weigh(
    chosen_TK: Tensor, score: Score, pre_softmax: bool, *, norm_topk_prob: bool | None
) -> Tensor:
    """Return the probabilities of the chosen experts from their scores."""
    if score is Score.softmax:
        return chosen_TK if pre_softmax else chosen_TK.softmax(dim=-1)
    if score is Score.softmax_bias:
        return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True).clamp(min=LEAST_SUM)
    normalizes = chosen_TK.shape[1] > 1 if norm_topk_prob is None else norm_topk_prob
    if not normalizes:
        return chosen_TK
    return chosen_TK / (chosen_TK.sum(dim=-1, keepdim=True) + TINY)


def _known(score: Score | str) -> Score:
    try:
        return Score(score)
    except ValueError:
        raise ValueError(
            f"score={score!r}: must be one of {', '.join(s.value for s in Score)}"
        ) from None


def _check_sizes(num_experts: int, top_k: int, groups: int | None, topk_groups: int | None) -> None:
    _check_range("top_k", top_k, num_experts, why=f"the number of experts is {num_experts}")
    if groups is None and topk_groups is None:
        return
    if groups is None or topk_groups is None:
        raise ValueError(f"groups={groups}, topk_groups={topk_groups}: set both or neither")
    if groups < 1 or num_experts % groups:
        near = " or ".join(
            str(side.candidates[0]) for side in nearest_divisors(groups, num_experts)
        )
        raise ValueError(
            f"groups={groups}: must divide the {num_experts} experts; nearest that works: {near}"
        )
    _check_range(
        "topk_groups",
        topk_groups,
        min(groups, top_k),
        why=f"there are {groups} groups and top_k={top_k}",
    )
    in_kept = topk_groups * (num_experts // groups)
    _check_range(
        "top_k", top_k, in_kept, why=f"the {topk_groups} kept groups have {in_kept} experts"
    )


def _check_range(name: str, value: int, high: int, why: str) -> None:
    if not 1 <= value <= high:
        raise ValueError(
            f"{name}={value}: must be 1 to {high}, {why}; nearest that works: "
            f"{min(max(value, 1), high)}"
        )
