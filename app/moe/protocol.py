"""Interface of a dispatcher.

`app.plan.dispatchers` describes the ranks, memory and links that each dispatcher needs.

Shapes: T tokens of this rank, K experts per token, D hidden, R rows of this rank's experts, E
experts of the layer, or of this rank in `ends_E`.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

from app.moe.experts import Dispatched

# A dispatcher's own records, frozen dataclasses.
Prepared = TypeVar("Prepared")  # dispatch layout: what `preprocess` has found out for `dispatch`
Origin = TypeVar("Origin")  # combine handle: what `combine` needs to return rows to their tokens


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

    def dispatch(self, x_TD: Tensor, prepared: Prepared) -> tuple[Dispatched, Origin]:
        """Dispatch tokens T × D; return the rows of this rank's experts and the record for
        `combine`.

        Only this method may synchronize with the device (`PlannedDispatcher.waits_for_host`).
        """
        ...

    def combine(self, expert_out_RD: Tensor, probs_TK: Tensor, origin: Origin) -> Tensor:
        """Return expert outputs summed per token at its source rank, weighted by probability: T ×
        D.
        """
        ...
