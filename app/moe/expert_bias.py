"""Biases of experts, added to dispatched rows.

Shapes: R rows grouped by expert, O outputs, E experts, C columns of the outputs that have a bias
here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from app.kernels.tiling import ONES


def add_bias(rows_RO: Tensor, bias_EC: nn.Parameter, ends_E: Tensor, first: int = 0) -> Tensor:
    """Add the bias of each row's expert in place, to C columns from `first` on.

    Rows from ends[-1] on stay undefined. Nothing but `ends_E` is saved, and the gradient of a bias
    is a grouped GEMM of ones and rows: sums in a fixed order, accumulated in fp32.
    """
    out_RO: Tensor = _AddBias.apply(rows_RO, bias_EC, ends_E, first)
    return out_RO


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RO: Tensor, bias_EC: Tensor, ends_E: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(ends_E)
        ctx.columns = slice(first, first + bias_EC.shape[1])
        ctx.mark_dirty(rows_RO)
        number_R = torch.arange(len(rows_RO), dtype=ends_E.dtype, device=ends_E.device)
        expert_R = torch.searchsorted(ends_E, number_R, right=True, out_int32=True)
        # rows behind the last expert's have none
        expert_R.clamp_(max=len(bias_EC) - 1)
        rows_RO[:, ctx.columns] += bias_EC.index_select(0, expert_R)
        return rows_RO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        (ends_E,) = ctx.saved_tensors
        grad_RC = grad_RO[:, ctx.columns].contiguous()
        ones = grad_RC.new_ones(len(grad_RC), ONES)
        sums_EC = F.grouped_mm(ones.T, grad_RC, offs=ends_E)[:, 0]
        return grad_RO, sums_EC, None, None
