"""What carries tokens between the ranks of an expert group where all shapes are known beforehand.

Shapes: P ranks of the group · T tokens of each · N = P·T tokens of all, in rank order · K choices
of each · D width · R rows of this rank's experts, of which the device alone knows how many are
used · L experts of this rank. Experts s·L to (s+1)·L are on ranks s·etp to (s+1)·etp, a part of
each of them on each.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenTransport(Protocol):
    """Exchanges that never wait for the device, so they can be captured; all ranks of the group
    call the same ones in the same order.

    `row_of_NK` says which row here each choice of any rank has, R where none (`place_rows`). Rows
    that no choice has are neither written nor read. Nothing here is differentiable: the backward of
    `spread` is `sum_home` without probabilities, that of `sum_home` is `spread_gradients`.
    """

    def gather_choices(self, experts_TK: Tensor) -> Tensor:
        """Experts of this rank's tokens -> those of all tokens, integers N × K.

        The result may lie in memory that the next call but one writes to: use it at once.
        """
        ...

    def spread(self, x_TD: Tensor, row_of_NK: Tensor, num_rows: int) -> Tensor:
        """rows[row_of[n, k]] = x[n]: T × D -> R × D."""
        ...

    def sum_home(
        self, rows_RD: Tensor, probs_TK: Tensor | None, row_of_NK: Tensor, experts_TK: Tensor
    ) -> Tensor:
        """Each token's rows on all ranks, times its probabilities (None: 1), added up: T × D.

        Each rank adds its own in fp32 in order of k and rounds to the rows' type; the token's own
        rank adds these in fp32 in rank order, and rounds once more.
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
        """Gradients of the rows, R × D, and of the probabilities, T × K in fp32, in `sum_home`.

        Choices that have no row on any rank have a gradient of 0.
        """
        ...
