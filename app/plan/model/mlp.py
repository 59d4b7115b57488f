"""Weights of the SwiGLU of a dense layer or a shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from app.plan.model.weight import Initial, Part, Weight


@dataclass(frozen=True, slots=True)
class MlpWeights(Part):
    """Fused gate and up projection, and down projection, with optional biases."""

    # first, as a module registers its own parameters before its children's
    b_up: Weight | None
    b_down: Weight | None
    w_up: Weight
    w_down: Weight

    @classmethod
    def of(cls, hidden: int, ffn: int, *, bias: bool = False) -> MlpWeights:
        """Build a SwiGLU from `hidden` to `ffn` and back."""
        of_up = Weight((2, ffn), tp=1, gate_up=0, initial=Initial.zeros, decay=False, linear=False)
        of_down = Weight((hidden,), initial=Initial.zeros, decay=False, linear=False)
        return cls(
            b_up=of_up if bias else None,
            b_down=of_down if bias else None,
            w_up=Weight((2, ffn, hidden), tp=1, gate_up=0),
            w_down=Weight((hidden, ffn), tp=1, initial=Initial.residual),
        )
