"""Dispatcher for ranks that hold every expert: a permutation.

Shapes: T tokens, K experts of each, E experts in all, D hidden, R = T·K rows, or the sum of all
capacities.
"""

from __future__ import annotations

from torch import Tensor

from app.moe.experts import Dispatched
from app.moe.permute import Permutation, combine, permute, sort_by_expert


class LocalDispatcher:
    """Permutes tokens by expert; nothing is sent."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Permutation:
        """Sort the choices by expert."""
        return sort_by_expert(experts_TK, self.num_experts, drops, rows_per_expert=rows_per_expert)

    def dispatch(self, x_TD: Tensor, prepared: Permutation) -> tuple[Dispatched, Permutation]:
        """Map T × D -> R × D, expert-major."""
        return Dispatched(permute(x_TD, prepared), prepared.ends_E), prepared

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Permutation) -> Tensor:
        """Map R × D -> T × D."""
        return combine(expert_out_RD, probs_TK, origin)
