"""Placement of all ranks' tokens in the rows of this rank's experts, and operations on such rows:
kernels on a GPU, plain torch elsewhere, bit for bit equal.

Nothing synchronizes with the device, and there are no atomics: sums are fp32 in a fixed order.

Shapes: P ranks · T tokens of each · N = P·T tokens of all, in rank order · K choices of each · D
width · L experts of this rank · R rows; rows without a choice are neither written nor read. A
choice without a row here has the row R.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.kernels import peer_rows
from app.kernels import rows as kernels
from app.kernels.common import usable
from app.kernels.expert_rows import expert_rows
from app.kernels.quantise import Fp8Rows
from app.moe.permute import choice_of_rows, combine_gradients, sort_by_expert, widened


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows of this rank's experts, int32 on the device: expert-major, tokens ascending within an
    expert.
    """

    row_of_NK: Tensor  # R stands for no row here
    ends_E: Tensor  # L: the first row after each expert's, as `grouped_mm` takes it; at most R
    needed: Tensor  # one: rows that all choices would need; more than R is an overflow


def place_rows(chosen_NK: Tensor, first: int, local: int, num_rows: int) -> ExpertRows:
    """Assign a row to every choice of the `local` experts from id `first` on.

    Choices whose rows would lie beyond `num_rows` get none. A token's ids differ from each other;
    other ids have no row.
    """
    if chosen_NK.is_cuda and usable():
        return ExpertRows(*expert_rows(chosen_NK, first, local, num_rows=num_rows))
    expert_NK = chosen_NK.long() - first
    here_NK = (expert_NK >= 0) & (expert_NK < local)
    expert_NK = expert_NK.masked_fill(~here_NK, local)
    found = sort_by_expert(expert_NK, local, drops=True)
    row_NK = found.row_of_TK.masked_fill(~here_NK, num_rows).clamp(max=num_rows)
    ends_E = found.ends_E.clamp(max=num_rows)
    return ExpertRows(row_NK.to(torch.int32), ends_E, found.ends_E[-1:])


def spread_rows(
    x_ND: Tensor, row_of_NK: Tensor, num_rows: int, fp8_rows: Fp8Rows | None = None
) -> Tensor:
    """Return rows[row_of[n, k]] = x[n]: [R, D]; x is contiguous. Kernels also fill `fp8_rows`."""
    if usable(x_ND):
        return kernels.spread_rows(x_ND, row_of_NK, num_rows, fp8_rows=fp8_rows)
    assert fp8_rows is None, "only kernels write fp8_rows"
    return x_ND.index_select(0, choice_of_rows(row_of_NK, num_rows) // row_of_NK.shape[1])


def sum_partials(partial_PTD: Tensor, experts_TK: Tensor, local: int, etp: int) -> Tensor:
    """Return Σ_p partial[p, t] over the ranks p that have an expert of token t: [T, D].

    Adds in fp32 in rank order and rounds once.
    """
    if usable(partial_PTD):
        return peer_rows.sum_partials(partial_PTD, experts_TK, local, etp=etp)
    share_TK = experts_TK // local
    total_TD = partial_PTD.new_zeros((), dtype=widened(partial_PTD[:0]).dtype)
    for rank, partial_TD in enumerate(partial_PTD):
        sent_T1 = (share_TK == rank // etp).any(dim=1, keepdim=True)
        total_TD = total_TD + widened(partial_TD).masked_fill(~sent_T1, 0)
    return total_TD.to(partial_PTD.dtype)


def row_gradients(
    grad_ND: Tensor,
    rows_RD: Tensor,
    probs_NK: Tensor,
    row_of_NK: Tensor,
    fp8_rows: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weighted sums of rows: of the rows, rounded once, [R, D],
    undefined in rows without a choice; of the probabilities, [N, K] in their dtype.

    Kernels also fill `fp8_rows` with the rows' gradients.
    """
    if usable(rows_RD):
        return kernels.combine_gradients(grad_ND, rows_RD, probs_NK, row_of_NK, fp8_rows=fp8_rows)
    assert fp8_rows is None, "only kernels write fp8_rows"
    return combine_gradients(grad_ND, rows_RD, probs_NK, row_of_NK, drops=True)


def sum_dots(dots_PTK: Tensor, experts_TK: Tensor, local: int, etp: int) -> Tensor:
    """Return Σ_p dots[p, t, k] over the ranks p that hold a part of choice k's expert: [T, K].

    Adds in rank order; 0 if there is none.
    """
    if usable(dots_PTK):
        return peer_rows.sum_dots(dots_PTK, experts_TK, local, etp=etp)
    share_TK = experts_TK // local
    total_TK = torch.zeros_like(dots_PTK[0])
    for rank, dots_TK in enumerate(dots_PTK):
        total_TK = total_TK + dots_TK.masked_fill(share_TK != rank // etp, 0)
    return total_TK
