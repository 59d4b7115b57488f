"""Weights of RMSNorm."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import ModelConfig
from app.plan.model.weight import Initial, Part, Weight


@dataclass(frozen=True, slots=True)
class NormWeights(Part):
    """Scale of an RMSNorm, one value per element of the last dimension."""

    weight: Weight

    @classmethod
    def of(cls, width: int, tp: int | None = None) -> NormWeights:
        """Build a norm over `width` values; `tp` 0 divides them over tensor-parallel ranks."""
        return cls(Weight((width,), tp=tp, initial=Initial.ones, decay=False, linear=False))

    @classmethod
    def of_hidden(cls, model: ModelConfig) -> NormWeights:
        """Build a norm over hidden states."""
        return cls.of(model.hidden_size)
