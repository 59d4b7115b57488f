"""Grouped-query causal self-attention with rotary positions and optional query/key norms.

Shapes: B sequences, S tokens per sequence, D hidden, N query heads, G key/value heads, H head width.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from app.config import ModelConfig
from app.model.deferred import linear
from app.model.layers import Context, RMSNorm, rotate

ORDERED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # can add in a fixed order


class Attention(nn.Module):
    """Multi-head attention where N/G query heads share a key/value head (Ainslie et al. 2023).

    `wqkv` holds, per key/value head, its query heads, then its key, then its value, so that a contiguous part
    of its rows is a self-contained part of the heads.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.head_width
        self.num_kv_heads, self.queries_per_kv, self.width = model.num_kv_heads, model.num_heads // model.num_kv_heads, width
        self.wqkv = nn.Parameter(torch.empty((model.num_heads + 2 * model.num_kv_heads) * width, model.hidden_size))
        self.wo = nn.Parameter(torch.empty(model.hidden_size, model.num_heads * width))
        self.q_norm = RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, model.norm_eps) if model.qk_norm else nn.Identity()

    def forward(self, x_BSD: Tensor, context: Context) -> Tensor:
        """B × S × D -> B × S × D; no residual."""
        q_BSNH, k_BSGH, v_BSGH = self._heads(linear(x_BSD, self.wqkv, context.later))
        q_BSNH, k_BSGH = rotate(self.q_norm(q_BSNH), context), rotate(self.k_norm(k_BSGH), context)
        out_BNSH = attend(q_BSNH.transpose(1, 2), k_BSGH.transpose(1, 2), v_BSGH.transpose(1, 2), context)
        return linear(out_BNSH.transpose(1, 2).flatten(2), self.wo, context.later)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grouped = qkv.unflatten(-1, (self.num_kv_heads, self.queries_per_kv + 2, self.width))
        q, k, v = grouped.split((self.queries_per_kv, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


def attend(q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, context: Context) -> Tensor:
    """Softmax attention of N query heads over G key/value heads, causal or under the context's mask: B × N × S × H.

    On a GPU the fastest kernel (cuDNN's) adds the gradient of the queries with atomics, so that two equal runs drift
    apart, and torch offers no other order for it. A `repeatable` context takes kernels that add in a fixed order instead.
    """
    mask, gqa = context.mask_B1SS, q_BNSH.shape[1] != k_BGSH.shape[1]
    ordered = context.repeatable and q_BNSH.is_cuda
    with sdpa_kernel(ORDERED) if ordered else nullcontext():
        out = F.scaled_dot_product_attention(q_BNSH, k_BGSH, v_BGSH, attn_mask=mask, is_causal=mask is None, enable_gqa=gqa)
    if ordered and out.grad_fn is not None:
        # The order is a global switch, which would slow other operations: it is on for this node alone.
        before = torch.are_deterministic_algorithms_enabled()
        out.grad_fn.register_prehook(lambda grads: torch.use_deterministic_algorithms(True))
        out.grad_fn.register_hook(lambda grad_inputs, grad_outputs: torch.use_deterministic_algorithms(before))
    return out
