"""Collectives of rows with gradients, and copies of counts to the host.

Shapes: T tokens of this rank, N of all ranks, D hidden, K experts per token, R rows of this rank's
experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.collectives import all_gather, reduce_scatter
from app.moe.permute import Permutation, combine_gradients, sum_rows


def all_to_all_rows(
    rows: Tensor,
    input_splits: tuple[int, ...],
    output_splits: tuple[int, ...],
    group: dist.ProcessGroup,
) -> Tensor:
    """All-to-all with these splits; backward sends gradients the other way."""
    out: Tensor = _AllToAll.apply(rows, input_splits, output_splits, group)
    return out


def gather_and_permute(x_TD: Tensor, permutation: Permutation, group: dist.ProcessGroup) -> Tensor:
    """All-gather the tokens of all ranks and `permute` them: R × D."""
    rows_RD: Tensor = _GatherRows.apply(
        x_TD, permutation.token_of_row_R, permutation.row_of_TK, group
    )
    return rows_RD


def combine_and_scatter(
    rows_RD: Tensor, probs_TK: Tensor, permutation: Permutation, group: dist.ProcessGroup
) -> Tensor:
    """`combine` for the tokens of all ranks, reduce-scattered to the source ranks: T × D."""
    out_TD: Tensor = _CombineAndScatter.apply(rows_RD, probs_TK, permutation.row_of_TK, group)
    return out_TD


def gathered(own_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather rows in rank order: [T, …] -> [N, …]."""
    all_N = own_T.new_empty(group.size() * own_T.shape[0], *own_T.shape[1:])
    all_gather(all_N, own_T.contiguous(), group)
    return all_N


def start_to_host(values_AB: Tensor) -> Callable[[], list[list[int]]]:
    """Start copying a small integer matrix to the host; return a function that waits for it
    alone.
    """
    if not values_AB.is_cuda:
        return values_AB.tolist
    copy = values_AB.to("cpu", non_blocking=True, memory_format=torch.contiguous_format)
    there = torch.cuda.Event()
    there.record()

    def arrive() -> list[list[int]]:
        there.synchronize()
        return copy.tolist()

    return arrive


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        input_splits: tuple[int, ...],
        output_splits: tuple[int, ...],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.splits = input_splits, output_splits
        ctx.group = group
        return _uneven_all_to_all(rows, input_splits, output_splits, group=group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        input_splits, output_splits = ctx.splits
        grad = _uneven_all_to_all(grad, output_splits, input_splits, group=ctx.group)
        return grad, None, None, None


def _uneven_all_to_all(
    rows: Tensor,
    input_splits: tuple[int, ...],
    output_splits: tuple[int, ...],
    group: dist.ProcessGroup,
) -> Tensor:
    out = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    dist.all_to_all_single(
        out, rows.contiguous(), list(output_splits), list(input_splits), group=group
    )
    return out


class _GatherRows(torch.autograd.Function):
    """`permute` of the all-gathered tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        token_of_row_R: Tensor,
        row_of_NK: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(row_of_NK)
        ctx.group = group
        return gathered(x_TD, group).index_select(0, token_of_row_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        (row_of_NK,) = ctx.saved_tensors
        grad_ND = sum_rows(grad_RD, row_of_NK, None, drops=True)
        return _scattered(grad_ND, ctx.group).to(grad_RD.dtype), None, None, None


class _CombineAndScatter(torch.autograd.Function):
    """`combine` for the tokens of all ranks, reduce-scattered to the source ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        probs_TK: Tensor,
        row_of_NK: Tensor,
        group: dist.ProcessGroup,
    ) -> Tensor:
        probs_NK = gathered(probs_TK, group)
        ctx.save_for_backward(rows_RD, probs_NK, row_of_NK)
        ctx.group = group
        own_TD = _scattered(sum_rows(rows_RD, row_of_NK, probs_NK, drops=True), group)
        return own_TD.to(rows_RD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        grad_ND = gathered(grad_TD, ctx.group)
        rows_RD, probs_NK, row_of_NK = ctx.saved_tensors
        grad_RD, grad_NK = combine_gradients(grad_ND, rows_RD, probs_NK, row_of_NK, drops=True)
        return grad_RD, _scattered(grad_NK, ctx.group), None, None


def _scattered(all_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter rows: [N, …] -> [T, …]."""
    own_T = all_N.new_empty(all_N.shape[0] // group.size(), *all_N.shape[1:])
    reduce_scatter(own_T, all_N, group)
    return own_T
