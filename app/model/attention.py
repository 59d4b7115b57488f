"""Grouped-query causal self-attention with rotary positions and optional query/key norms.

Shapes: B sequences, S tokens per sequence, D hidden, N query heads, G key/value heads, H head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.config import ModelConfig
from app.model.layers import AttentionContext, RMSNorm, rotate


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

    def forward(self, x_BSD: Tensor, context: AttentionContext) -> Tensor:
        """B × S × D -> B × S × D; no residual."""
        q_BSNH, k_BSGH, v_BSGH = self._heads(F.linear(x_BSD, self.wqkv))
        q_BSNH, k_BSGH = rotate(self.q_norm(q_BSNH), context), rotate(self.k_norm(k_BSGH), context)
        out_BNSH = F.scaled_dot_product_attention(
            q_BSNH.transpose(1, 2),
            k_BSGH.transpose(1, 2),
            v_BSGH.transpose(1, 2),
            attn_mask=context.mask_B1SS,
            is_causal=context.mask_B1SS is None,
            enable_gqa=self.queries_per_kv > 1,
        )
        return F.linear(out_BNSH.transpose(1, 2).flatten(2), self.wo)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grouped = qkv.unflatten(-1, (self.num_kv_heads, self.queries_per_kv + 2, self.width))
        q, k, v = grouped.split((self.queries_per_kv, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
