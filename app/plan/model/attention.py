"""Grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import ModelConfig
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Initial, Part, Weight


def attention_weights(model: ModelConfig) -> Part:
    """Those of the attention of one layer, of the kind that the model has."""
    return AttentionWeights.of(model)


@dataclass(frozen=True, slots=True)
class AttentionWeights(Part):
    """Projections in and out; norms of query and key heads, which are the same for every head."""

    wqkv: Weight  # per key/value head: its query heads, its key, its value
    wo: Weight
    q_norm: NormWeights | None
    k_norm: NormWeights | None

    @classmethod
    def of(cls, model: ModelConfig) -> AttentionWeights:
        """Those of one layer."""
        hidden = model.hidden_size
        width = model.head_width
        norm = NormWeights.of(width) if model.qk_norm else None
        return cls(
            wqkv=Weight(((model.num_heads + 2 * model.num_kv_heads) * width, hidden), tp=0),
            wo=Weight((hidden, model.num_heads * width), tp=1, initial=Initial.residual),
            q_norm=norm,
            k_norm=norm,
        )
