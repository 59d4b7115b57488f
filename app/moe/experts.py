"""Experts of a rank as two grouped GEMMs, whose group sizes are read on the device.

Shapes: R rows grouped by expert · E experts with rows here: the L of this rank, then replicas · D
width · F this rank's part of the hidden width of an expert · I × O a matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from torch import Tensor, nn

from app.choices import Recompute
from app.model.layers.layer_groups import ALONE, LayerGroups
from app.model.layers.layers import swiglu
from app.model.layers.linear import GroupedLinear
from app.model.layers.ready import ReadyRows
from app.model.layers.recompute import Keep, Recomputation
from app.model.layers.replica_weight import ReplicaWeight
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.experts import ExpertWeights


class ReplicaExperts(Protocol):
    """Replicas of remote experts whose rows follow those of this rank's own experts."""

    def of(self, up_LIO: Tensor, down_LIO: Tensor) -> tuple[ReplicaWeight, ReplicaWeight]:
        """Return the replicas' up and down matrices, given those of this rank's experts."""


class Experts(nn.Module):
    """This rank's experts: stacked weights `[expert, in, out]`, gate and up side by side in `w_up`.

    If several ranks hold parts of the hidden width, the experts' output is the sum over them.
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
        """Compute (silu(r·up[:, :F]) · (r·up[:, F:]))·down of every row r with its expert's
        weights.

        R × D -> R × D (SwiGLU, arXiv 2002.05202); rows and `ends_E` as in `GroupedLinear`.
        `recompute` may discard the activation and recompute it in backward. `keep` stores for
        backward the input rows, the rows between the GEMMs, and the output. `replicas`: remote
        experts that own the last rows. `ready` may hold rows that a kernel has already quantised to
        FP8.
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
