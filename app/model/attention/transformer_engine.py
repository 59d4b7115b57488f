"""Softmax attention by cuDNN's kernels through Transformer Engine.

Compared with torch it adds a deterministic backward of cuDNN, and cuDNN's kernels for queries that
are the last of more keys, for windows and for documents. Only two functions of the library are
used; they are captured like any other kernel.

Shapes: as in `app.model.attention.modules`; S queries here, T tokens of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from app.model.layers.attend import DocumentOffsets
from app.model.layers.transformer_engine import LIBRARY

SEQUENCES, DOCUMENTS = "bshd", "thd"  # formats of heads
LEARNT = "learnable"  # the library's word for a softmax with a learnt sink


@dataclass(frozen=True, slots=True)
class _Choices:
    """What a call asks for besides its tensors."""

    window: int | None
    documents: DocumentOffsets | None
    scale: float

    @property
    def format(self) -> str:
        """Format of heads: documents are told apart in tokens of all sequences."""
        return SEQUENCES if self.documents is None else DOCUMENTS

    def rows(self, heads: Tensor) -> Tensor:
        """Return B × S × … heads in that format, contiguous."""
        return (heads if self.documents is None else heads.flatten(0, 1)).contiguous()


class TransformerEngineAttention:
    """Attention (`Attend`) by cuDNN; bf16 or fp16.

    `deterministic`: backward accumulates the gradient of the queries in a fixed order. It then
    allocates a matrix of all scores in the dtype of the queries. Rules refuse it for documents,
    where that matrix would be as large for each of them.

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
        window: int | None,
        documents: DocumentOffsets | None,
        scale: float | None,
    ) -> Tensor:
        """See `Attend`."""
        factor = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
        choices = _Choices(window, documents, factor)
        trained = any(each.requires_grad for each in (q_BSNH, k_BKGH, v_BKGH))
        if torch.is_grad_enabled() and trained:
            out_BSNH: Tensor = _Attention.apply(q_BSNH, k_BKGH, v_BKGH, choices, self)
            return out_BSNH
        return self.run_forward(q_BSNH, k_BKGH, v_BKGH, choices=choices, keeps=False)[0]

    def with_sinks(self, sinks_N: Tensor) -> TransformerEngineSinks:
        """Return attention by the same kernels with a learnt sink per query head."""
        return TransformerEngineSinks(self, sinks_N)

    def run_forward(
        self, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, *, choices: _Choices, keeps: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Return B × S × N × H and, if `keeps`, what backward needs besides: a number per row, and
        a random state that backward does not read.
        """
        out, kept = self.forward(
            is_training=keeps, **self._arguments(q_BSNH, k_BKGH, v_BKGH, choices=choices)
        )
        return out.view(*q_BSNH.shape[:3], -1), list(kept or [])

    def run_backward(
        self, saved: Sequence[Tensor], grad_BSNH: Tensor, choices: _Choices
    ) -> Sequence[Tensor]:
        """Return the gradients of queries, keys and values.

        `saved` holds these, the output, and what forward saved besides.
        """
        found = zip(self.gradients(saved, grad_BSNH, choices), saved[:3], strict=False)
        return [grad.view(each.shape) for grad, each in found]

    def gradients(
        self, saved: Sequence[Tensor], grad_BSNH: Tensor, choices: _Choices
    ) -> Sequence[Tensor]:
        """Return the gradients of queries, keys, values, a bias and sinks, as the library does.

        Views are made contiguous once more here instead of being saved twice.
        """
        q_BSNH, k_BKGH, v_BKGH, out_BSNH, *kept = saved
        return self.backward(
            o=choices.rows(out_BSNH),
            d_o=choices.rows(grad_BSNH),
            aux_ctx_tensors=kept,
            do_format=choices.format,
            dqkv_layout=_layout(choices.format),
            deterministic=self.deterministic,
            **self._arguments(q_BSNH, k_BKGH, v_BKGH, choices=choices),
        )

    def _arguments(
        self, q_BSNH: Tensor, k_BKGH: Tensor, v_BKGH: Tensor, choices: _Choices
    ) -> dict[str, object]:
        """Return the arguments that forward and backward share."""
        queries, keys = q_BSNH.shape[1], k_BKGH.shape[1]
        mask = "causal" if queries == keys else "causal_bottom_right"
        if choices.documents is None:
            ends = {
                "cu_seqlens_q": self._all_ends(q_BSNH),
                "cu_seqlens_kv": self._all_ends(k_BKGH),
            }
        else:
            ends, mask = _offsets(choices.documents), f"padding_{mask}"
        return ends | {
            "max_seqlen_q": queries,
            "max_seqlen_kv": keys,
            "q": choices.rows(q_BSNH),
            "k": choices.rows(k_BKGH),
            "v": choices.rows(v_BKGH),
            "fake_dtype": q_BSNH.dtype,
            "fused_attention_backend": self.kernels,
            "attn_scale": choices.scale,
            "dropout": 0.0,
            "qkv_layout": _layout(choices.format),
            "o_format": choices.format,
            "attn_bias_type": "no_bias",
            "attn_mask_type": mask,
            # keys before a query, all if −1, and after it
            "window_size": (-1 if choices.window is None else choices.window - 1, 0),
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


class TransformerEngineSinks(TransformerEngineAttention):
    """The same kernels (`Attend`) with a learnt sink per query head."""

    def __init__(self, by: TransformerEngineAttention, sinks_N: Tensor) -> None:
        self.__dict__.update(by.__dict__)
        self.sinks_N = sinks_N
        offset = sinks_N.detach().float().view(1, -1, 1, 1)
        self.forward = partial(by.forward, softmax_type=LEARNT, softmax_offset=offset)
        self.backward = partial(by.backward, softmax_type=LEARNT)

    def __call__(
        self,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        *,
        window: int | None,
        documents: DocumentOffsets | None,
        scale: float | None,
    ) -> Tensor:
        """See `Attend`."""
        factor = q_BSNH.shape[-1] ** -0.5 if scale is None else scale
        choices = _Choices(window, documents, factor)
        if torch.is_grad_enabled():
            out_BSNH: Tensor = _AttentionWithSinks.apply(
                q_BSNH, k_BKGH, v_BKGH, self.sinks_N, choices, self
            )
            return out_BSNH
        return self.run_forward(q_BSNH, k_BKGH, v_BKGH, choices=choices, keeps=False)[0]


def _layout(heads: str) -> str:
    """Return the layout of queries, keys and values, which are separate tensors."""
    return "_".join([heads] * 3)


def _offsets(documents: DocumentOffsets) -> dict[str, Tensor]:
    """Return the arguments that tell documents apart: lengths in sums, then where each begins.

    A document without queries here gets no keys either, so that no kernel has to mind it.
    """
    offsets = {"cu_seqlens_q_padded": documents.queries, "cu_seqlens_kv_padded": documents.keys}
    sums_of_keys = documents.keys
    if documents.keys is not documents.queries:
        lengths = documents.keys.diff() * (documents.queries.diff() > 0)
        sums_of_keys = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return {"cu_seqlens_q": documents.queries, "cu_seqlens_kv": sums_of_keys} | offsets


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        choices: _Choices,
        by: TransformerEngineAttention,
    ) -> Tensor:
        out_BSNH, kept = by.run_forward(q_BSNH, k_BKGH, v_BKGH, choices=choices, keeps=True)
        ctx.save_for_backward(q_BSNH, k_BKGH, v_BKGH, out_BSNH, *kept)
        ctx.choices, ctx.by = choices, by
        return out_BSNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.by.run_backward(ctx.saved_tensors, grad_BSNH, ctx.choices)
        return *grads, None, None


class _AttentionWithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSNH: Tensor,
        k_BKGH: Tensor,
        v_BKGH: Tensor,
        sinks_N: Tensor,
        choices: _Choices,
        by: TransformerEngineSinks,
    ) -> Tensor:
        out_BSNH, kept = by.run_forward(q_BSNH, k_BKGH, v_BKGH, choices=choices, keeps=True)
        ctx.save_for_backward(q_BSNH, k_BKGH, v_BKGH, out_BSNH, *kept)
        ctx.choices, ctx.by, ctx.dtype = choices, by, sinks_N.dtype
        return out_BSNH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSNH: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        q, k, v, _, sinks = ctx.by.gradients(saved, grad_BSNH, ctx.choices)
        grads = (grad.view(each.shape) for grad, each in zip((q, k, v), saved[:3], strict=True))
        return *grads, sinks.flatten().to(ctx.dtype), None, None
