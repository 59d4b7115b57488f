"""Weights of norms."""

from __future__ import annotations

from dataclasses import dataclass

from app.choices import NormKind
from app.config import ModelConfig
from app.plan.model.weight import Initial, Part, Weight

PLUS_ONE = frozenset((NormKind.rms_plus_one, NormKind.layer_plus_one))  # scaled by 1 + weight
BIASED = frozenset((NormKind.layer_bias, NormKind.layer_plus_one))


@dataclass(frozen=True, slots=True)
class NormWeights(Part):
    """Scale of a norm and an optional bias, one value per element of the last dimension."""

    weight: Weight
    bias: Weight | None = None

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
        found = cls.of(model.hidden_size, plus_one=model.norm in PLUS_ONE)
        if model.norm not in BIASED:
            return found
        bias = Weight((model.hidden_size,), initial=Initial.zeros, decay=False, linear=False)
        return cls(found.weight, bias)
