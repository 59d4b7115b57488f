"""Interface of a dispatcher, and the record it hands to the experts.

`app.plan.dispatchers` describes the ranks, memory and links that each dispatcher needs.

Shapes: T tokens of this rank, K experts per token, D hidden, R rows of this rank's experts, E
experts of the layer, or of this rank in `ends_E`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from app.model.layers.ready import ReadyRows
from app.model.layers.recompute import Keep
from app.moe.experts import ReplicaExperts

# A dispatcher's own records, frozen dataclasses.
Prepared = TypeVar("Prepared")  # dispatch layout: what `preprocess` has found out for `dispatch`
Origin = TypeVar("Origin")  # combine handle: what `combine` needs to return rows to their tokens


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Dispatched tokens as rows of this rank's experts.

    Rows are expert-major: those of this rank's first expert, then of the second, … Rows from
    ends[-1] on are unused.
    """

    rows_RD: Tensor
    # int32, on the device: cumulative row counts, the `offs` of `grouped_mm`
    ends_E: Tensor
    # how backward keeps tensors with this many rows; None leaves them to autograd
    keep: Keep | None = None
    replicas: ReplicaExperts | None = None  # remote experts that own the last rows


class Dispatcher(Protocol[Prepared, Origin]):
    """Dispatches tokens to the experts' ranks and combines the results at the source ranks."""

    def preprocess(
        self, experts_TK: Tensor, drops: bool = False, rows_per_expert: int | None = None
    ) -> Prepared:
        """Compute the layout of rows as far as the device can, without synchronizing.

        drops: some choices have the id E and are ignored. `rows_per_expert`: every expert is padded
        to that many rows from this rank (`PlannedDispatcher.rows_per_expert`); no expert may be
        chosen more often, and the number, like T, must be equal on all ranks.
        """
        ...

    def dispatch(
        self, x_TD: Tensor, prepared: Prepared, ready: ReadyRows | None = None
    ) -> tuple[Dispatched, Origin]:
        """Dispatch tokens T × D; return the rows of this rank's experts and the record for
        `combine`.

        Kernels that produce rows, or in backward the gradient of expert outputs, may also quantise
        them into `ready` for FP8 GEMMs; otherwise the GEMM quantises them.

        Only this method may synchronize with the device (`PlannedDispatcher.waits_for_host`).
        """
        ...

    def combine(
        self,
        expert_out_RD: Tensor,
        probs_TK: Tensor,
        origin: Origin,
        ready: ReadyRows | None = None,
    ) -> Tensor:
        """Return expert outputs summed per token at its source rank, weighted by probability: T ×
        D.
        """
        ...
