"""Permutation of token rows to experts and back, by gathers and ordered sums: bitwise reproducible.

A choice is a token-expert assignment; a row is a permuted token, one per choice.

Shapes: T tokens · K experts per token · R rows · D width · E experts. No atomics and no
synchronization in either direction: backward never scatters with addition, because a permutation's
transpose is a gather by its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.kernels import rows as kernels
from app.kernels.common import usable
from app.kernels.expert_rows import counts_fast, expert_rows
from app.kernels.quantise import Fp8Rows


@dataclass(frozen=True, slots=True)
class Permutation:
    """Map between tokens and rows grouped by expert.

    R is T·K, unless rows are left out because nobody chose them here, or added to pad experts. A
    dropped choice has no row: its entry of `row_of_TK` is R or more.
    """

    token_of_row_R: Tensor  # int64: the token each row is a copy of
    row_of_TK: Tensor  # int64: the row of each token's k-th expert
    ends_E: Tensor  # int32: cumulative row counts, the `offs` of `grouped_mm`
    drops: bool = False  # some choices may have no row, and some rows no choice


def sort_by_expert(
    experts_TK: Tensor, num_experts: int, drops: bool = False, rows_per_expert: int | None = None
) -> Permutation:
    """Sort choices by expert, tokens ascending within an expert; expert ids in [0, num_experts).

    drops: larger ids are choices without a row. Only the device knows their number, so R stays T·K,
    and rows from ends[-1] on are unused. `rows_per_expert` gives every expert that many rows: no id
    may occur more often, and unread padding, copies of the first token or zeros, fills the rest. A
    token's ids below `num_experts` differ from each other.
    """
    on_gpu = experts_TK.is_cuda and usable()
    if rows_per_expert is None and on_gpu and counts_fast(len(experts_TK), num_experts):
        return _placed(experts_TK, num_experts, drops)
    sorted_R, place_of_row_R = _narrow(experts_TK.flatten(), num_experts).sort(stable=True)
    rows_R = torch.arange(place_of_row_R.numel(), device=experts_TK.device)
    ids_E = torch.arange(num_experts, device=experts_TK.device, dtype=sorted_R.dtype)
    tokens_R = place_of_row_R // experts_TK.shape[1]
    if rows_per_expert is not None:
        drops = True
        sorted_R = sorted_R.long()
        ids_E = ids_E.long()
        starts_E = torch.searchsorted(sorted_R, ids_E)
        count = num_experts * rows_per_expert
        shift_E = ids_E * rows_per_expert - starts_E
        rows_R = rows_R + shift_E[sorted_R.clamp(max=num_experts - 1)]
        rows_R = rows_R.masked_fill(sorted_R >= num_experts, count)  # the index of dropped choices
        tokens_R = tokens_R.new_zeros(count + 1).scatter_(0, rows_R, tokens_R)[:count]
        ends_E = ((ids_E + 1) * rows_per_expert).to(torch.int32)
    else:
        ends_E = torch.searchsorted(sorted_R, ids_E, right=True, out_int32=True)
        if drops:
            rows_R = rows_R.masked_fill(sorted_R >= num_experts, len(rows_R))
    row_of_R = torch.empty_like(place_of_row_R).scatter_(0, place_of_row_R, rows_R)
    return Permutation(tokens_R, row_of_R.view_as(experts_TK), ends_E, drops=drops)


def _placed(experts_TK: Tensor, num_experts: int, drops: bool) -> Permutation:
    """Build the permutation with a counting kernel instead of a sort; unused rows take the first
    token.
    """
    count = experts_TK.numel()
    make = experts_TK.new_zeros if drops else experts_TK.new_empty
    token_of_R = make(count, dtype=torch.int64)
    row_of_TK, ends_E, _ = expert_rows(
        experts_TK, 0, num_experts, num_rows=count, token_of_R=token_of_R
    )
    return Permutation(token_of_R, row_of_TK.long(), ends_E, drops=drops)


def permute(x_TD: Tensor, permutation: Permutation) -> Tensor:
    """Return token rows grouped by expert: [R, D]; a token's gradient sums its K rows in fp32."""
    rows_RD: Tensor = _Permute.apply(
        x_TD, permutation.token_of_row_R, permutation.row_of_TK, permutation.drops
    )
    return rows_RD


def combine(rows_RD: Tensor, probs_TK: Tensor, permutation: Permutation) -> Tensor:
    """Return out[t] = Σ_k probs[t, k] · rows[row_of[t, k]], in fp32 in order of k: [T, D], rows'
    dtype.

    Dropped choices count as 0, and so does their gradient, whatever the rows hold.
    """
    out_TD: Tensor = _Combine.apply(rows_RD, probs_TK, permutation.row_of_TK, permutation.drops)
    return out_TD


def reorder(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Return rows[index] for a bijection of the rows, whose inverse is `inverse_R`: [R, D]."""
    out_RD: Tensor = _Reorder.apply(rows_RD, index_R, inverse_R)
    return out_RD


def sum_rows(
    rows_RD: Tensor,
    row_of_TK: Tensor,
    weights_TK: Tensor | None,
    drops: bool,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return Σ_k weights[t, k] · rows[row_of[t, k]], weight 1 for None, accumulated in fp32: [T,
    D].

    Without a gradient; fp64 for fp64 rows. With `drops` choices may have no row, and count as 0.
    The result has `dtype`, by default that of the accumulator.
    """
    if usable(rows_RD):
        return kernels.sum_rows(rows_RD, row_of_TK, weights_TK, dtype=dtype or torch.float32)
    total_TD: Tensor | None = None
    for k in range(row_of_TK.shape[1]):
        part_TD = widened(pick_rows(rows_RD, row_of_TK, drops, k=k))
        part_TD = part_TD if weights_TK is None else part_TD.mul_(weights_TK[:, k, None])
        total_TD = part_TD if total_TD is None else total_TD.add_(part_TD)
    assert total_TD is not None, "every token has at least one expert"
    return total_TD if dtype is None else total_TD.to(dtype)


def combine_gradients(
    grad_TD: Tensor,
    rows_RD: Tensor,
    probs_TK: Tensor,
    row_of_TK: Tensor,
    drops: bool,
    fp8_rows: Fp8Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `combine`: of the rows [R, D] and of the probabilities [T, K].

    With `drops` those of rows without a choice are 0, and of choices without a row. Kernels also
    fill `fp8_rows` with the rows' gradients.
    """
    if usable(rows_RD):
        return kernels.combine_gradients(
            grad_TD, rows_RD, probs_TK, row_of_TK, zeros=drops, fp8_rows=fp8_rows
        )
    assert fp8_rows is None, "only kernels write fp8_rows"
    count = len(rows_RD)
    if drops:  # one extra entry takes choices without a row
        places_R = row_of_TK.clamp(max=count).flatten()
        probs_R = probs_TK.new_zeros(count + 1).scatter_(0, places_R, probs_TK.flatten())[:count]
    else:
        probs_R = probs_TK.new_empty(count).scatter_(0, row_of_TK.flatten(), probs_TK.flatten())
    # in place: rows · fp32 probabilities is rounded once and never stored in fp32
    token_of_row_R = choice_of_rows(row_of_TK, count) // row_of_TK.shape[1]
    grad_RD = grad_TD.index_select(0, token_of_row_R).mul_(probs_R[:, None])
    dots_KT = [
        dot_rows(pick_rows(rows_RD, row_of_TK, drops, k=k), grad_TD)
        for k in range(row_of_TK.shape[1])
    ]
    return grad_RD, torch.stack(dots_KT, dim=1).to(probs_TK.dtype)


def choice_of_rows(row_of_TK: Tensor, num_rows: int) -> Tensor:
    """Return the choice, of T·K, of each row; 0 for rows without one: int64 [R]."""
    choices = torch.arange(row_of_TK.numel(), device=row_of_TK.device)
    choice_R = choices.new_zeros(num_rows + 1)  # the last entry takes choices without a row
    places = row_of_TK.flatten().long().clamp(max=num_rows)
    return choice_R.scatter_(0, places, choices)[:num_rows]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        token_of_row_R: Tensor,
        row_of_TK: Tensor,
        drops: bool,
    ) -> Tensor:
        ctx.save_for_backward(row_of_TK)
        ctx.drops = drops
        if usable(x_TD):
            return kernels.spread_rows(x_TD, row_of_TK, len(token_of_row_R), zeros=drops)
        return x_TD.index_select(0, token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_TK,) = ctx.saved_tensors
        grad_TD = sum_rows(grad_RD, row_of_TK, None, drops=ctx.drops, dtype=grad_RD.dtype)
        return grad_TD, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_TK: Tensor,
        drops: bool,
    ) -> Tensor:
        ctx.drops = drops
        ctx.save_for_backward(rows_RD, probs_TK, row_of_TK)
        return sum_rows(rows_RD, row_of_TK, probs_TK, drops=drops, dtype=rows_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, probs_TK, row_of_TK = ctx.saved_tensors
        grad_RD, dots_TK = combine_gradients(grad_TD, rows_RD, probs_TK, row_of_TK, drops=ctx.drops)
        return grad_RD, dots_TK, None, None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RD.index_select(0, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, inverse_R), None, None


def _narrow(experts_R: Tensor, num_experts: int) -> Tensor:
    """Cast ids to the narrowest dtype, since a radix sort makes a pass per byte; ids beyond
    `num_experts` may become equal.
    """
    for dtype in (torch.uint8, torch.int16):
        largest = torch.iinfo(dtype).max
        if num_experts <= largest:
            return experts_R.clamp(max=largest).to(dtype)
    return experts_R


def widened(x: Tensor) -> Tensor:
    """Cast to fp32, unless the dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dot_rows(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """Return row-wise dot products in fp32: [T]."""
    return (widened(a_TD) * b_TD).sum(dim=-1)


def pick_rows(rows_RD: Tensor, row_of_TK: Tensor, drops: bool, k: int) -> Tensor:
    """Return the rows of the tokens' k-th experts, zero if there is none: [T, D], new memory."""
    if not drops:
        return rows_RD.index_select(0, row_of_TK[:, k])
    if not len(rows_RD):
        return rows_RD.new_zeros(len(row_of_TK), rows_RD.shape[1])
    picked_TD = rows_RD.index_select(0, row_of_TK[:, k].clamp(max=len(rows_RD) - 1))
    # selected, not multiplied: the row may hold NaN
    return picked_TD.masked_fill_(row_of_TK[:, k, None] >= len(rows_RD), 0)
