"""What flash-linear-attention's gated delta rule allocates and keeps, in the order of fla-core
0.6.0 (fla/ops/gated_delta_rule/chunk.py); what its kernels would write stays as it was allocated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64


def as_library(
    q_BSGK: Tensor, k_BSGK: Tensor, v_BSHV: Tensor, *, g_BSH: Tensor, beta_BSH: Tensor
) -> Tensor:
    """Take the place of `by_library`."""
    q, k, v = (each.contiguous() for each in (q_BSGK, k_BSGK, v_BSHV))
    out_BSHV: Tensor = _Library.apply(q, k, v, g_BSH, beta_BSH)
    return out_BSHV


def _states(k_BSGK: Tensor, v_BSHV: Tensor) -> Tensor:
    batch, tokens, heads, width = v_BSHV.shape
    return v_BSHV.new_empty(batch, -(-tokens // BLOCK), heads, k_BSGK.shape[-1], width)


def _per_value_head(k_BSGK: Tensor, v_BSHV: Tensor) -> Tensor:
    return v_BSHV.new_empty(*v_BSHV.shape[:3], k_BSGK.shape[-1])


def _per_key_head(x_BSHK: Tensor, heads: int) -> Tensor:
    if x_BSHK.shape[2] == heads:
        return x_BSHK
    return x_BSHK.unflatten(2, (heads, -1)).sum(3)


class _Library(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        normed_q, q_rstd = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        normed_k, k_rstd = torch.empty_like(k), k.new_empty(k.shape[:-1], dtype=torch.float32)
        summed = torch.empty_like(g)
        inverse = v.new_zeros(*v.shape[:3], BLOCK)
        w, u = _per_value_head(k, v), torch.empty_like(v)
        states, written = _states(k, v), torch.empty_like(v)
        out = torch.empty_like(v)
        del w, u, states, written
        ctx.save_for_backward(normed_q, q_rstd, normed_k, k_rstd, v, summed, beta, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHV: Tensor) -> tuple[Tensor, ...]:
        _, _, k, _, v, g, beta, _ = ctx.saved_tensors
        heads = k.shape[2]
        w, u = _per_value_head(k, v), torch.empty_like(v)
        states, written = _states(k, v), torch.empty_like(v)
        local = torch.empty_like(v)
        grad_states, grad_written = _states(k, v), torch.empty_like(v)
        del local
        grad_q, grad_k = _per_value_head(k, v), _per_value_head(k, v)
        grad_g, grad_w = torch.empty_like(g), torch.empty_like(w)
        grad_q = _per_key_head(grad_q, heads)
        grad_k = _per_key_head(grad_k, heads)
        more, grad_v = _per_value_head(k, v), torch.empty_like(v)
        more_g, grad_beta = torch.empty_like(g), torch.empty_like(beta)
        more = _per_key_head(more, heads)
        grad_g = torch.empty_like(grad_g)
        del w, u, states, written, grad_states, grad_written, grad_w, more, more_g
        return torch.empty_like(grad_q), torch.empty_like(grad_k), grad_v, grad_g, grad_beta
