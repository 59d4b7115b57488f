"""SwiGLU of a dense layer or of a shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from app.plan.model.weight import Initial, Part, Weight


@dataclass(frozen=True, slots=True)
class MlpWeights(Part):
    """Gate and up projection in one, and the way back."""

    w_up: Weight
    w_down: Weight

    @classmethod
    def of(cls, hidden: int, ffn: int) -> MlpWeights:
        """From `hidden` to `ffn` and back."""
        return cls(
            w_up=Weight((2, ffn, hidden), tp=1, gate_up=0),
            w_down=Weight((hidden, ffn), tp=1, initial=Initial.residual),
        )
