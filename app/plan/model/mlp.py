"""Weights of the feed-forward of a dense layer or a shared expert."""

from __future__ import annotations

from dataclasses import dataclass

from app.plan.model.weight import Initial, Part, Weight


@dataclass(frozen=True, slots=True)
class MlpWeights(Part):
    """Fused gate and up projection, or up projection alone, and down projection, with optional
    biases.
    """

    # first, as a module registers its own parameters before its children's
    b_up: Weight | None
    b_down: Weight | None
    w_up: Weight
    w_down: Weight

    @classmethod
    def of(cls, hidden: int, ffn: int, *, bias: bool = False, gate: bool = True) -> MlpWeights:
        """Build a feed-forward from `hidden` to `ffn` and back; `gate`: a SwiGLU or its like."""
        up = (2, ffn) if gate else (ffn,)
        gate_up = 0 if gate else None
        of_up = Weight(
            up, tp=len(up) - 1, gate_up=gate_up, initial=Initial.zeros, decay=False, linear=False
        )
        of_down = Weight((hidden,), initial=Initial.zeros, decay=False, linear=False)
        return cls(
            b_up=of_up if bias else None,
            b_down=of_down if bias else None,
            w_up=Weight((*up, hidden), tp=len(up) - 1, gate_up=gate_up),
            w_down=Weight((hidden, ffn), tp=1, initial=Initial.residual),
        )
