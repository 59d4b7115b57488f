"""Experts of a rank as two grouped GEMMs, whose group sizes are read on the device.

Shapes: R rows grouped by expert · E experts with rows here: the L of this rank, then replicas · D
width · F this rank's part of the hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from app.choices import Recompute
from app.config import MoEConfig
from app.kernels.clamped_swiglu import clamped_swiglu
from app.model.layers.layer_groups import ALONE, LayerGroups
from app.model.layers.layers import expert_swiglu
from app.model.layers.linear import GroupedLinear, GroupedLinearBackend
from app.model.layers.recompute import Recomputation
from app.model.layers.weight_grads import WeightGradSink
from app.moe.expert_bias import add_bias
from app.plan.model.experts import ExpertWeights

# (gate and up side by side R × 2F, number of used rows int32 [1]) -> R × F
Activation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Dispatched tokens as rows of this rank's experts.

    Rows are expert-major: those of this rank's first expert, then of the second, … Rows from
    ends[-1] on are unused. Dispatchers wrap it to change how experts compute or save rows.
    """

    rows_RD: Tensor
    # int32, on the device: cumulative row counts, the `offs` of `grouped_mm`
    ends_E: Tensor

    def gemms(
        self, experts: Experts, deferred: bool
    ) -> tuple[GroupedLinearBackend, GroupedLinearBackend]:
        """Return what computes the up and the down matrices. `deferred`: weight gradients are
        computed later than input gradients.
        """
        return experts.w_up.backend, experts.w_down.backend

    def saved(self, rows: Tensor, recompute: Recomputation | None) -> Tensor:
        """Return rows of the experts, after noting where backward will read them from."""
        return rows


class Experts(nn.Module):
    """This rank's experts: stacked weights `[expert, in, out]`, gate and up side by side in `w_up`.

    If several ranks hold parts of the hidden width, the experts' output is the sum over them.
    """

    def __init__(self, weights: ExpertWeights, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.w_up = GroupedLinear(weights.w_up, layer_groups)
        self.w_down = GroupedLinear(weights.w_down, layer_groups)
        self.activation: Activation = expert_swiglu

    def forward(
        self,
        dispatched: Dispatched,
        sink: WeightGradSink | None = None,
        recompute: Recomputation | None = None,
    ) -> Tensor:
        """Compute (silu(r·up[:, :F]) · (r·up[:, F:]))·down of every row r with its expert's
        weights.

        R × D -> R × D (SwiGLU, arXiv 2002.05202). `recompute` may discard the activation and
        recompute it in backward.
        """
        ends_E = dispatched.ends_E
        saved = partial(dispatched.saved, recompute=recompute)
        up, down = dispatched.gemms(self, sink is not None and sink.deferred)
        both_R2F = self.up(saved(dispatched.rows_RD), ends_E, sink, backend=up)
        saved(both_R2F)

        def activation(both_R2F: Tensor) -> Tensor:
            # there may be several times as many rows as tokens, and only the device knows
            return self.activation(both_R2F, ends_E[-1:])

        if recompute is not None and recompute.recomputes(Recompute.experts_act):
            act_RF = recompute.checkpoint_and_discard(Recompute.experts_act, activation, both_R2F)
        else:
            act_RF = saved(activation(both_R2F))
        return saved(self.down(act_RF, ends_E, sink, backend=down))

    def up(
        self,
        rows_RD: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None,
        *,
        backend: GroupedLinearBackend,
    ) -> Tensor:
        """Project rows to gate and up: R × 2F."""
        return self.w_up.forward(rows_RD, ends_E, sink, backend=backend)

    def down(
        self,
        act_RF: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None,
        *,
        backend: GroupedLinearBackend,
    ) -> Tensor:
        """Project activations back: R × D."""
        return self.w_down.forward(act_RF, ends_E, sink, backend=backend)


class ExpertsWithBias(Experts):
    """Experts with biases on gate, up and down projections."""

    def __init__(self, weights: ExpertWeights, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(weights, layer_groups)
        coords = layer_groups.coords
        assert weights.b_up is not None and weights.b_down is not None
        self.b_up = nn.Parameter(torch.empty(coords.shape(weights.b_up)))
        self.b_down = nn.Parameter(torch.empty(coords.shape(weights.b_down)))
        self.first = coords.block(weights.b_down).start[1]  # output that b_down begins at

    def up(
        self,
        rows_RD: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None,
        *,
        backend: GroupedLinearBackend,
    ) -> Tensor:
        """See `Experts`."""
        return add_bias(super().up(rows_RD, ends_E, sink, backend=backend), self.b_up, ends_E)

    def down(
        self,
        act_RF: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None,
        *,
        backend: GroupedLinearBackend,
    ) -> Tensor:
        """See `Experts`."""
        out_RD = super().down(act_RF, ends_E, sink, backend=backend)
        return add_bias(out_RD, self.b_down, ends_E, first=self.first)


def build_experts(weights: ExpertWeights, moe: MoEConfig, layer_groups: LayerGroups) -> Experts:
    """Build the experts of a layer, with the activation and biases that the model has."""
    experts = (ExpertsWithBias if moe.expert_bias else Experts)(weights, layer_groups)
    if moe.swiglu_limit is not None:
        experts.activation = partial(
            clamped_swiglu, limit=moe.swiglu_limit, alpha=moe.activation_alpha
        )
    return experts
