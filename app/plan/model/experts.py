"""Weights of a mixture-of-experts body: router, routed and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from app.config import ModelConfig, MoEConfig
from app.plan.model.mlp import MlpWeights
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Initial, Part, Weight


def _bias(
    shape: tuple[int, ...],
    ep: int | None = None,
    etp: int | None = None,
    gate_up: int | None = None,
) -> Weight:
    return Weight(
        shape,
        ep=ep,
        etp=etp,
        gate_up=gate_up,
        initial=Initial.zeros,
        decay=False,
        linear=False,
    )


@dataclass(frozen=True, slots=True)
class RouterWeights(Part):
    """Matrix of the router, a row per expert, and a bias of its logits."""

    weight: Weight
    bias: Weight | None

    @classmethod
    def of(cls, hidden: int, num_experts: int, *, bias: bool = False) -> RouterWeights:
        """Build a router for `num_experts`."""
        return cls(
            weight=Weight((num_experts, hidden), linear=False),
            bias=_bias((num_experts,)) if bias else None,
        )

    def weights(self, path: str = "") -> Iterator[tuple[str, Weight]]:
        """See `Part`; an adapter is a module in that of the router, whose own parameters precede
        it.
        """
        own = {"weight": self.weight, "bias": self.bias}
        yield from ((path + name, each) for name, each in own.items() if each is not None)
        for adapter in self.weight.adapters:
            yield from adapter.weights(f"{path}weight")


@dataclass(frozen=True, slots=True)
class ExpertWeights(Part):
    """SwiGLU weights of all routed experts, `[expert, in, out]`, with optional biases.

    Expert tensor parallelism divides both biases by outputs: its ranks' outputs are added up, so
    each adds another part of the bias of w_down.
    """

    # first, as a module registers its own parameters before its children's
    b_up: Weight | None
    b_down: Weight | None
    w_up: Weight
    w_down: Weight

    @classmethod
    def of(cls, hidden: int, ffn: int, num_experts: int, *, bias: bool = False) -> ExpertWeights:
        """Build experts from `hidden` to `ffn` and back."""
        return cls(
            b_up=_bias((num_experts, 2, ffn), 0, etp=2, gate_up=1) if bias else None,
            b_down=_bias((num_experts, hidden), 0, etp=1) if bias else None,
            w_up=Weight((num_experts, hidden, 2, ffn), ep=0, etp=3, gate_up=2),
            w_down=Weight((num_experts, ffn, hidden), ep=0, etp=1, initial=Initial.residual),
        )


@dataclass(frozen=True, slots=True)
class MoEBodyWeights(Part):
    """Norm, router, experts; the shared expert, and its gate of one value per token."""

    # first, as a module registers its own parameters before its children's
    shared_gate: Weight | None
    norm: NormWeights
    router: RouterWeights
    experts: ExpertWeights
    shared: MlpWeights | None

    @classmethod
    def of(cls, model: ModelConfig, moe: MoEConfig) -> MoEBodyWeights:
        """Build the weights of one layer."""
        hidden = model.hidden_size
        width = moe.shared_ffn_hidden_size
        return cls(
            shared_gate=Weight((1, hidden), linear=False) if moe.shared_gate else None,
            norm=NormWeights.of_hidden(model),
            router=RouterWeights.of(hidden, moe.num_experts, bias=moe.logit_bias),
            experts=ExpertWeights.of(
                hidden, moe.ffn_hidden_size, moe.num_experts, bias=moe.expert_bias
            ),
            shared=MlpWeights.of(hidden, width, bias=model.mlp_bias) if width else None,
        )
