"""Weights of norms."""

from __future__ import annotations

from dataclasses import dataclass

from app.choices import NormKind
from app.config import ModelConfig
from app.plan.model.weight import Initial, Part, Weight


@dataclass(frozen=True, slots=True)
class NormWeights(Part):
    """Scale of a norm, one value per element of the last dimension."""

    weight: Weight

    @classmethod
    def of(cls, width: int, tp: int | None = None, *, plus_one: bool = False) -> NormWeights:
        """Build a norm over `width` values; `tp` 0 divides them over tensor-parallel ranks.

        `plus_one`: its scale is 1 + the weight.
        """
        initial = Initial.zeros if plus_one else Initial.ones
        return cls(Weight((width,), tp=tp, initial=initial, decay=False, linear=False))

    @classmethod
    def of_hidden(cls, model: ModelConfig) -> NormWeights:
        """Build a norm over hidden states."""
        return cls.of(model.hidden_size, plus_one=model.norm is NormKind.rms_plus_one)
