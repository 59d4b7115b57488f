"""Selection of the tokens an expert drops beyond its capacity
(`app.plan.parts.dispatch_record.capacity`).

Shapes: T tokens of a rank, K experts per token, E experts, R = T·K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.choices import DropPolicy


def within_capacity(
    probs_TK: Tensor, experts_TK: Tensor, num_experts: int, limit: int, policy: DropPolicy
) -> Tensor:
    """Return which choices stay if every expert takes at most `limit` of them: bool [T, K].

    The choices with the highest probabilities stay; with `DropPolicy.position`, those of the first
    tokens. Ties are broken by position, so the result is reproducible. Never synchronizes with the
    device.
    """
    experts_R = experts_TK.flatten()
    if policy is DropPolicy.position:
        by_expert_R, choice_R = experts_R.sort(stable=True)
    else:
        ranked_R = probs_TK.detach().flatten().argsort(descending=True, stable=True)
        by_expert_R, order_R = experts_R[ranked_R].sort(stable=True)
        choice_R = ranked_R[order_R]
    starts_E = torch.searchsorted(by_expert_R, torch.arange(num_experts, device=experts_R.device))
    place_R = torch.arange(len(experts_R), device=experts_R.device) - starts_E[by_expert_R]
    kept_R = torch.empty_like(place_R, dtype=torch.bool).scatter_(0, choice_R, place_R < limit)
    return kept_R.view_as(experts_TK)
