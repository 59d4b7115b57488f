"""Moving token rows to their experts and back: gathers and ordered sums only, so every result repeats bit for bit.

Shapes: T tokens · K experts per token · R = T·K rows, one per (token, expert) · D width · E experts.
No atomics and no wait for the device in either direction: backward never scatters with addition, because a permutation's
transpose is a gather by its inverse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True)
class Permutation:
    """Where rows grouped by expert come from and go back to."""

    token_of_row_R: Tensor  # int64: the token each row is a copy of
    row_of_TK: Tensor  # int64: the row of each token's k-th expert
    ends_E: Tensor  # int32: the first row after each expert's, as `grouped_mm` takes it


def sort_by_expert(experts_TK: Tensor, num_experts: int) -> Permutation:
    """Rows in order of expert, tokens ascending within an expert; expert ids in [0, num_experts)."""
    sorted_R, place_of_row_R = experts_TK.flatten().sort(stable=True)
    rows_R = torch.arange(place_of_row_R.numel(), device=experts_TK.device)
    row_of_TK = torch.empty_like(place_of_row_R).scatter_(0, place_of_row_R, rows_R).view_as(experts_TK)
    ids_E = torch.arange(num_experts, device=experts_TK.device, dtype=sorted_R.dtype)
    ends_E = torch.searchsorted(sorted_R, ids_E, right=True, out_int32=True)
    return Permutation(place_of_row_R // experts_TK.shape[1], row_of_TK, ends_E)


def permute(x_TD: Tensor, permutation: Permutation) -> Tensor:
    """Copies of the token rows, grouped by expert: [R, D]. A token's gradient is the sum over its K rows, in fp32."""
    return _Permute.apply(x_TD, permutation.token_of_row_R, permutation.row_of_TK)


def combine(rows_RD: Tensor, probs_TK: Tensor, permutation: Permutation) -> Tensor:
    """out[t] = Σ_k probs[t, k] · rows[row_of[t, k]], added in fp32 in the order of k: [T, D] in the rows' dtype."""
    return _Combine.apply(rows_RD, probs_TK, permutation.token_of_row_R, permutation.row_of_TK)


def reorder(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """rows[index] for a bijection of the rows: [R, D]; `inverse_R` undoes it: index[inverse[r]] == r."""
    return _Reorder.apply(rows_RD, index_R, inverse_R)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_of_row_R: Tensor, row_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_TK)
        return x_TD.index_select(0, token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (row_of_TK,) = ctx.saved_tensors
        return _sum_rows(grad_RD, row_of_TK, None), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, probs_TK: Tensor, token_of_row_R: Tensor, row_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RD, probs_TK, token_of_row_R, row_of_TK)
        return _sum_rows(rows_RD, row_of_TK, probs_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows_RD, probs_TK, token_of_row_R, row_of_TK = ctx.saved_tensors
        probs_R = probs_TK.new_empty(probs_TK.numel()).scatter_(0, row_of_TK.flatten(), probs_TK.flatten())
        # in place, so that the product with fp32 probabilities is rounded once and never stored in fp32
        grad_RD = grad_TD.index_select(0, token_of_row_R).mul_(probs_R[:, None])
        grad_TK = torch.stack([_dot(rows_RD.index_select(0, row_T), grad_TD) for row_T in row_of_TK.unbind(1)], dim=1)
        return grad_RD, grad_TK.to(probs_TK.dtype), None, None


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


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dot(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """Row-wise dot products in fp32: [T]."""
    return (_wide(a_TD) * b_TD).sum(dim=-1)


def _sum_rows(rows_RD: Tensor, row_of_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Σ_k weights[t, k] · rows[row_of[t, k]] (weight 1 for None): one fp32 accumulator [T, D] instead of [T, K, D]."""
    total_TD: Tensor | None = None
    for k, row_T in enumerate(row_of_TK.unbind(1)):
        part_TD = _wide(rows_RD.index_select(0, row_T))
        part_TD = part_TD if weights_TK is None else part_TD.mul_(weights_TK[:, k, None])
        total_TD = part_TD if total_TD is None else total_TD.add_(part_TD)
    assert total_TD is not None, "every token has at least one expert"
    return total_TD.to(rows_RD.dtype)
