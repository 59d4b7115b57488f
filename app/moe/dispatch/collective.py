"""The transport by collectives of equal sizes, on any back end and device.

Shapes as in `app.moe.dispatch.transport`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_to_all
from app.moe.dispatch.collectives import gathered
from app.moe.dispatch.expert_rows import (
    partial_sums,
    row_gradients,
    spread_rows,
    sum_dots,
    sum_partials,
)


class CollectiveTransport:
    """Gathers the tokens of all ranks on each of them; what these make of a token goes back to its
    rank by an all-to-all of equal parts. N·D elements arrive in either direction.
    """

    def __init__(self, group: dist.ProcessGroup, local: int, etp: int = 1) -> None:
        self.group = group
        self.local = local  # experts of this rank
        self.etp = etp

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """See the protocol; int32, which every back end takes."""
        return gathered(experts_TK.to(torch.int32), self.group)

    def spread(self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int) -> Tensor:
        """See the protocol."""
        return spread_rows(gathered(x_TD, self.group), row_of_NK, num_rows)

    def sum_home(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """See the protocol."""
        probs_NK = None if probs_TK is None else gathered(probs_TK, self.group)
        partial_ND = partial_sums(rows_RD, probs_NK, row_of_NK)
        return sum_partials(self._home(partial_ND), experts_TK, self.local, etp=self.etp)

    def spread_gradients(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        experts_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        grad_ND, probs_NK = (gathered(own, self.group) for own in (grad_TD, probs_TK))
        grad_RD, dots_NK = row_gradients(grad_ND, rows_RD, probs_NK, row_of_NK=row_of_NK)
        return grad_RD, sum_dots(self._home(dots_NK), experts_TK, self.local, etp=self.etp)

    def _home(self, values_N: Tensor) -> Tensor:
        """Values of all tokens -> those of this rank's that every rank has made: [P, T, …]."""
        ranks = self.group.size()
        return all_to_all(values_N.unflatten(0, (ranks, len(values_N) // ranks)), self.group)
