"""Weights of the SwiGLU of a dense layer or a shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from app.plan.model.weight import Initial, Part, Weight


@dataclass(frozen=True, slots=True)
class MlpWeights(Part):
    """Fused gate and up projection, and down projection."""

    w_up: Weight
    w_down: Weight

    @classmethod
    def of(cls, hidden: int, ffn: int) -> MlpWeights:
        """Build a SwiGLU from `hidden` to `ffn` and back."""
        return cls(
            w_up=Weight((2, ffn, hidden), tp=1, gate_up=0),
            w_down=Weight((hidden, ffn), tp=1, initial=Initial.residual),
        )
