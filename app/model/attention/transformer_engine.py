"""Softmax attention by cuDNN's kernels through Transformer Engine.

Compared with torch it adds a deterministic backward of cuDNN, and cuDNN's kernels for queries that
are the last of more keys. Only two functions of the library are used; they are captured like any
other kernel.

Shapes: as in `app.model.attention.modules`; S queries here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.layers.transformer_engine import LIBRARY

FORMAT = "bshd"
LAYOUT = "_".join([FORMAT] * 3)  # queries, keys and values are separate tensors
CAUSAL_WINDOW = (-1, 0)  # all keys before a query, none after it


class TransformerEngineAttention:
    """Causal attention (`Attend`) without document masks; bf16 or fp16.

    `deterministic`: backward accumulates the gradient of the queries in a fixed order. It then
    allocates a matrix of all scores in the dtype of the queries.

    Every forward takes 16 numbers from torch's CUDA generator, as if there were dropout: other
    users of it (`model.moe.jitter_eps`) draw other numbers than with torch's kernels.
    """

    def __init__(self, deterministic: bool) -> None:
        # comes with the library, but is not in its public module
        functions = import_module(f"{LIBRARY}.pytorch.cpp_extensions.fused_attn")
        self.forward: Callable[..., tuple[Tensor, Sequence[Tensor]]] = functions.fused_attn_fwd
        self.backward: Callable[..., Sequence[Tensor]] = functions.fused_attn_bwd
        self.kernels = functions.FusedAttnBackend["F16_arbitrary_seqlen"]
        self.deterministic = deterministic
        self._ends: dict[tuple[int, int, torch.device], Tensor] = {}

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        mask_B1SK: Tensor | None,
        scale: float | None,
    ) -> Tensor:
        """See `Attend`."""
        assert mask_B1SK is None, (
            "document masks need torch's attention (train.attention_backend=torch)"
        )
        factor = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
        trained = any(each.requires_grad for each in (q_BSNH, k_BKGH, v_BKGH))
        if torch.is_grad_enabled() and trained:
            out_BSNH: Tensor = _Attention.apply(q_BSNH, k_BKGH, v_BKGH, factor, self)
            return out_BSNH
        return self.run_forward(q_BSNH, k_BKGH, v_BKGH, scale=factor, keeps=False)[0]

    def run_forward(
        self, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, *, scale: float, keeps: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return B × S × N × H and, if `keeps`, what backward needs besides: a number per row, and
        a random state that backward does not read.
        """
        out_BSNH, kept = self.forward(
            is_training=keeps, **self._arguments(q_BSNH, k_BKGH, v_BKGH, scale=scale)
        )
        return out_BSNH, list(kept or [])

    def run_backward(
        self, saved: Sequence[Tensor], grad_BSNH: Tensor, scale: float
    ) -> Sequence[Tensor]:
        """Return the gradients of queries, keys and values.

        `saved` holds these, the output, and what forward saved besides. Views are made contiguous
        once more here instead of being saved twice.
        """
        q_BSNH, k_BKGH, v_BKGH, out_BSNH, *kept = saved
        found = self.backward(
            o=out_BSNH,
            d_o=grad_BSNH.contiguous(),
            aux_ctx_tensors=kept,
            do_format=FORMAT,
            dqkv_layout=LAYOUT,
            deterministic=self.deterministic,
            **self._arguments(q_BSNH, k_BKGH, v_BKGH, scale=scale),
        )
        return found[:3]

    def _arguments(
        self, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, scale: float
    ) -> dict[str, object]:
        """Return the arguments that forward and backward share."""
        queries, keys = q_BSNH.shape[1], k_BKGH.shape[1]
        return {
            "max_seqlen_q": queries,
            "max_seqlen_kv": keys,
            "cu_seqlens_q": self._all_ends(q_BSNH),
            "cu_seqlens_kv": self._all_ends(k_BKGH),
            "q": q_BSNH.contiguous(),
            "k": k_BKGH.contiguous(),
            "v": v_BKGH.contiguous(),
            "fake_dtype": q_BSNH.dtype,
            "fused_attention_backend": self.kernels,
            "attn_scale": scale,
            "dropout": 0.0,
            "qkv_layout": LAYOUT,
            "o_format": FORMAT,
            "attn_bias_type": "no_bias",
            "attn_mask_type": "causal" if queries == keys else "causal_bottom_right",
            "window_size": CAUSAL_WINDOW,
            # the library refuses what a replay would compute wrongly
            "cuda_graph": q_BSNH.is_cuda and torch.cuda.is_current_stream_capturing(),
        }

    def _all_ends(self, heads: Tensor) -> Tensor:
        """Return the offsets of sequences in tokens, int32 [B + 1]; made once per shape, so that
        graphs read the same memory as the steps before them.
        """
        count, length = heads.shape[:2]
        key = count, length, heads.device
        if key not in self._ends:
            ends = torch.arange(count + 1, dtype=torch.int32, device=heads.device)
            self._ends[key] = ends * length
        return self._ends[key]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        scale: float,
        by: TransformerEngineAttention,
    ) -> Tensor:
        out_BSNH, kept = by.run_forward(q_BSNH, k_BKGH, v_BKGH, scale=scale, keeps=True)
        ctx.save_for_backward(q_BSNH, k_BKGH, v_BKGH, out_BSNH, *kept)
        ctx.scale, ctx.by = scale, by
        return out_BSNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.by.run_backward(ctx.saved_tensors, grad_BSNH, ctx.scale)
        return *grads, None, None
