"""Transport of tokens between the ranks of an expert group, with all shapes known beforehand.

Shapes: P ranks of the group · T tokens of each · N = P·T tokens of all, in rank order · K choices
of each · D width · R rows of this rank's experts, of which the device alone knows how many are used
· L experts of this rank. Experts s·L to (s+1)·L are on ranks s·etp to (s+1)·etp, one part of each
expert on each rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_to_all
from app.kernels.quantise import Fp8Rows
from app.moe.dispatch.expert_rows import row_gradients, spread_rows, sum_dots, sum_partials
from app.moe.permute import sum_rows
from app.moe.row_collectives import gathered


class TokenTransport(Protocol):
    """Communication that never synchronizes with the device, so it can be captured; all ranks of
    the group call the same methods in the same order.

    `row_of_NK` holds the row here of each choice of any rank, R for none (`place_rows`). Rows
    without a choice are neither written nor read. Nothing here is differentiable: the backward of
    `spread` is `combine` without probabilities, that of `combine` is `spread_gradients`.
    """

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """All-gather the experts chosen by this rank's tokens: integers N × K.

        The result may lie in memory that the next call but one overwrites: use it at once.
        """
        ...

    def spread(self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int) -> Tensor:
        """Return rows[row_of[n, k]] = x[n]: T × D -> R × D."""
        ...

    def combine(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """Sum each token's rows on all ranks, times its probabilities (None means 1), at its source
        rank: T × D.

        Each rank adds its own rows in fp32 in order of k and rounds to their dtype; the source rank
        adds these sums in fp32 in rank order, and rounds once more.
        """
        ...

    def spread_gradients(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        experts_TK: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of `combine`: of the rows, R × D, and of the probabilities, T × K in
        fp32.

        Dropped choices have a gradient of 0; those whose rows are missing an undefined one.
        """
        ...


class SizedTransport(TokenTransport, Protocol):
    """Transport with memory for a number of tokens that was fixed when it was built."""

    @property
    def tokens(self) -> int:
        """Return T."""
        ...


class CollectiveTransport:
    """Transport by collectives of equal sizes, on any back end and device. Kernels of both spreads
    also write their rows to `fp8_rows`, if given.

    All-gathers the tokens; an all-to-all of equal parts returns what a rank makes of a token to its
    source rank. N·D elements arrive in either direction.
    """

    def __init__(self, group: dist.ProcessGroup, local: int, etp: int = 1) -> None:
        self.group = group
        self.local = local  # experts of this rank
        self.etp = etp

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """See the protocol; int32, which every back end takes."""
        return gathered(experts_TK.to(torch.int32), self.group)

    def spread(
        self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int, fp8_rows: Fp8Rows | None = None
    ) -> Tensor:
        """See the protocol."""
        return spread_rows(gathered(x_TD, self.group), row_of_NK, num_rows, fp8_rows=fp8_rows)

    def combine(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """See the protocol."""
        probs_NK = None if probs_TK is None else gathered(probs_TK, self.group)
        partial_ND = sum_rows(rows_RD, row_of_NK, probs_NK, drops=True, dtype=rows_RD.dtype)
        return sum_partials(self._to_sources(partial_ND), experts_TK, self.local, etp=self.etp)

    def spread_gradients(
        self,
        grad_TD: Tensor,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        experts_TK: Tensor,
        fp8_rows: Fp8Rows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        grad_ND, probs_NK = (gathered(own, self.group) for own in (grad_TD, probs_TK))
        grad_RD, dots_NK = row_gradients(
            grad_ND, rows_RD, probs_NK, row_of_NK=row_of_NK, fp8_rows=fp8_rows
        )
        return grad_RD, sum_dots(self._to_sources(dots_NK), experts_TK, self.local, etp=self.etp)

    def _to_sources(self, values_N: Tensor) -> Tensor:
        """All-to-all of per-token values to the tokens' source ranks: [N, …] -> [P, T, …]."""
        ranks = self.group.size()
        return all_to_all(values_N.unflatten(0, (ranks, len(values_N) // ranks)), self.group)
