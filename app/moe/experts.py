"""The experts of a rank as two grouped products, whose group sizes are read on the device.

Shapes: R rows grouped by expert · E experts of this rank · D width · F this rank's part of the
hidden width of an expert.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor, nn

from app.choices import Recompute
from app.model.clones import ReplicaWeight
from app.model.fp8.ready import ReadyRows
from app.model.layer_groups import ALONE, LayerGroups
from app.model.layers import swiglu
from app.model.linear import GroupedLinear
from app.model.recompute import Keep, Recomputation
from app.model.weight_grads import WeightGradSink
from app.plan.model.experts import ExpertWeights


class ReplicaExperts(Protocol):
    """Experts of other ranks that compute rows here, behind those of this rank's own."""

    def of(self, up_LIO: Tensor, down_LIO: Tensor) -> tuple[ReplicaWeight, ReplicaWeight]:
        """Their matrices of both kinds, where this rank's experts have these."""


class Experts(nn.Module):
    """This rank's experts: stacked weights `[expert, in, out]`, gate and up side by side in `w_up`.

    With a part of their hidden width on each of several ranks, the sum over the parts' outputs is
    the experts' output.
    """

    def __init__(self, weights: ExpertWeights, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.w_up = GroupedLinear(weights.w_up, layer_groups)
        self.w_down = GroupedLinear(weights.w_down, layer_groups)

    def forward(
        self,
        rows_RD: Tensor,
        ends_E: Tensor,
        sink: WeightGradSink | None = None,
        recompute: Recomputation | None = None,
        keep: Keep | None = None,
        replicas: ReplicaExperts | None = None,
        ready: ReadyRows | None = None,
    ) -> Tensor:
        """(silu(r·up[:, :F]) · (r·up[:, F:]))·down of every row r, with the weights of its expert.

        R × D -> R × D (SwiGLU, arXiv 2002.05202); rows and `ends_E` as in `GroupedLinear`.
        `recompute` may have backward compute the activation again. `keep` says where backward has
        rows from: those that came, those between the products, and the result for who reads that.
        The last rows may be of experts that are `replicas` by other ranks. Rows may be `ready` in eight
        bits, where products read these.
        """
        up, down = (None, None)
        if replicas is not None:
            up, down = replicas.of(self.w_up.weight, self.w_down.weight)

        def kept(rows: Tensor) -> Tensor:
            if keep is not None and recompute is not None:
                recompute.replace(rows, keep(rows))
            return rows

        both_R2F = self.w_up.forward(
            kept(rows_RD), ends_E, sink, keep=keep, replicas=up, ready=ready
        )
        kept(both_R2F)
        # there may be several times as many rows as tokens, and only the device knows
        activation = partial(swiglu, used=ends_E[-1:], ready=ready)
        if recompute is not None and recompute.recomputes(Recompute.experts_act):
            act_RF = recompute.checkpoint_and_discard(Recompute.experts_act, activation, both_R2F)
        else:
            act_RF = kept(activation(both_R2F))
        return kept(
            self.w_down.forward(act_RF, ends_E, sink, keep=keep, replicas=down, ready=ready)
        )
