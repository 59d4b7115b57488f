"""Causal self-attention with rotary positions: grouped-query with optional query/key norms, or
multi-head latent.

Shapes: B sequences, S tokens per sequence of a context-parallel rank, s = S / tp of them between
matrices, K tokens of a whole sequence, D hidden; N query heads, G key/value heads of this rank, H
head width, V width of a value head; L width of the latent of keys and values, R width that rotary
positions rotate.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.choices import Recompute
from app.config import AttentionSpec, MLAConfig
from app.kernels.attention.heads import HeadNorms, split_and_rotate
from app.kernels.common import usable
from app.model.attention.linear import LinearAttention
from app.model.attention.over_ranks import attend_all, attended_heads
from app.model.attention.sinks import with_sinks
from app.model.layers.layer_groups import ALONE, LayerGroups, gather_tokens, size
from app.model.layers.layers import (
    Context,
    RMSNorm,
    WholeNorm,
    interleaved_to_halves,
    norm_all_heads,
    rotate,
    rotate_part,
)
from app.model.layers.linear import ColumnParallelLinear, RowParallelLinear
from app.model.layers.norms import PlusOneNorm
from app.model.layers.weight_grads import WeightGradSink
from app.plan.model.attention import AttentionWeights, LatentAttentionWeights
from app.plan.model.norm import NormWeights


def attention(spec: AttentionSpec, layer_groups: LayerGroups = ALONE) -> nn.Module:
    """Build the attention of one layer: maps B × s × D and a context to B × s × D, without the
    residual.
    """
    if spec.linear is not None:
        return LinearAttention(spec, spec.linear, layer_groups)
    if spec.mla is not None:
        return LatentAttention(spec, spec.mla, layer_groups)
    if spec.gate:
        plus = spec.norm_plus_one and spec.qk_norm
        return (PlusOneGatedAttention if plus else GatedAttention)(spec, layer_groups)
    if spec.norm_plus_one and spec.qk_norm:
        plus_one = PlusOneAttentionWithOutBias if spec.out_bias else PlusOneAttention
        return plus_one(spec, layer_groups)
    kinds = {
        (False, False): Attention,
        (False, True): AttentionWithOutBias,
        (True, False): AttentionWithSinks,
        (True, True): AttentionWithSinksAndOutBias,
    }
    return kinds[spec.sinks, spec.out_bias](spec, layer_groups)


class Attention(nn.Module):
    """Multi-head attention where N/G query heads share a key/value head (Ainslie et al. 2023).

    `wqkv` holds, per key/value head, its query heads, then its key, then its value, so that any
    contiguous block of its rows, such as a tensor-parallel shard, holds complete heads.
    """

    def __init__(self, spec: AttentionSpec, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__()
        self.spec = spec
        self.layer_groups = layer_groups
        self.num_kv_heads = spec.kv_heads // size(layer_groups.tp)
        self.queries_per_kv = spec.heads // spec.kv_heads
        partly = spec.rope is not None and spec.rope.width < spec.width
        self.rotate = rotate_part if partly else rotate
        weights = AttentionWeights.of(spec)
        bias = weights.bqkv
        self.bqkv = (
            None if bias is None else nn.Parameter(torch.empty(layer_groups.coords.shape(bias)))
        )
        self.wqkv = ColumnParallelLinear(weights.wqkv, layer_groups)
        self.wo = RowParallelLinear(weights.wo, layer_groups)
        if spec.qk_norm_whole and weights.q_norm is not None and weights.k_norm is not None:
            self.q_norm: nn.Module = WholeNorm(weights.q_norm, layer_groups)
            self.k_norm: nn.Module = WholeNorm(weights.k_norm, layer_groups)
        else:
            self.q_norm = _norm(weights.q_norm, spec.eps)
            self.k_norm = _norm(weights.k_norm, spec.eps)

    def forward(self, x_BsD: Tensor, context: Context) -> Tensor:
        """Map B × s × D -> B × s × D, without the residual."""
        qkv = self._gemm(x_BsD, context)
        heads = context.recompute.checkpoint(Recompute.attn_core, self._core, qkv, context)
        return self.out(heads, context.sink)

    def out(self, heads: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """Project the heads of all tokens to hidden states of this rank's: B × s × D."""
        return self.wo.forward(heads, sink)

    def heads(self, x_BsD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated heads for a KV cache: q B × S × N × H, k and v B × S × G × H."""
        return self._heads(self._gemm(x_BsD, context), context)

    def _gemm(self, x_BsD: Tensor, context: Context) -> Tensor:
        qkv = self.wqkv.forward(x_BsD, context.sink)
        # in place is safe: autograd has not saved it
        return qkv if self.bqkv is None else qkv.add_(self.bqkv)

    def _core(self, qkv: Tensor, context: Context) -> Tensor:
        q_BSNH, k_BSGH, v_BSGH = self._heads(qkv, context)
        return attend_all(
            q_BSNH,
            k_BSGH,
            v_BSGH,
            context=context,
            layer_groups=self.layer_groups,
            window=self.spec.window,
            scale=self.spec.scale,
        ).flatten(2)

    def _heads(self, qkv: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return q B × S × N × H, k and v B × S × G × H, with q/k norms if any and rotary
        positions.
        """
        qkv = self._all_normed(qkv)
        table = None if self.spec.rope is None else context.rotary[self.spec.rope]
        if usable(qkv) and table is not None:
            return split_and_rotate(
                qkv,
                table.cos_BS1H,
                table.sin_BS1H,
                num_kv_heads=self.num_kv_heads,
                queries_per_kv=self.queries_per_kv,
                norms=self._head_norms(),
            )
        grouped = qkv.unflatten(-1, (self.num_kv_heads, self.queries_per_kv + 2, self.spec.width))
        q, k, v = grouped.split((self.queries_per_kv, 1, 1), dim=3)
        q_BSNH, k_BSGH = q.flatten(2, 3), k.squeeze(3)
        if isinstance(self.q_norm, RMSNorm):
            q_BSNH, k_BSGH = self.q_norm(q_BSNH), self.k_norm(k_BSGH)
        if table is not None:
            q_BSNH, k_BSGH = self.rotate(q_BSNH, table), self.rotate(k_BSGH, table)
        return q_BSNH, k_BSGH, v.squeeze(3)

    def _all_normed(self, qkv: Tensor) -> Tensor:
        """Apply the norms over all heads together, if the model has them."""
        if not isinstance(self.q_norm, WholeNorm) or not isinstance(self.k_norm, WholeNorm):
            return qkv
        return norm_all_heads(
            qkv,
            self.q_norm,
            self.k_norm,
            num_kv_heads=self.num_kv_heads,
            eps=self.spec.eps,
            group=self.layer_groups.tp,
        )

    def _head_norms(self) -> HeadNorms | None:
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm):
            return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return None


class PlusOneAttention(Attention):
    """Attention whose norms of heads are scaled by 1 + their weights (Gemma 3)."""

    def __init__(self, spec: AttentionSpec, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(spec, layer_groups)
        weights = AttentionWeights.of(spec)
        assert weights.q_norm is not None and weights.k_norm is not None
        self.q_norm = PlusOneNorm(weights.q_norm, spec.eps)
        self.k_norm = PlusOneNorm(weights.k_norm, spec.eps)

    def _head_norms(self) -> HeadNorms | None:
        assert isinstance(self.q_norm, PlusOneNorm) and isinstance(self.k_norm, PlusOneNorm)
        return HeadNorms(self.q_norm.scale, self.k_norm.scale, self.spec.eps)


class AttentionWithOutBias(Attention):
    """Attention with a bias on its output."""

    def __init__(self, spec: AttentionSpec, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(spec, layer_groups)
        bias = AttentionWeights.of(spec).bo
        assert bias is not None
        self.bo = nn.Parameter(torch.empty(layer_groups.coords.shape(bias)))

    def out(self, heads: Tensor, sink: WeightGradSink | None = None) -> Tensor:
        """See `Attention`."""
        # in place is safe: autograd has not saved it
        return super().out(heads, sink).add_(self.bo)


class PlusOneAttentionWithOutBias(PlusOneAttention, AttentionWithOutBias):
    """Attention of Gemma 3 with biases."""


class GatedAttention(Attention):
    """Attention whose heads' outputs are multiplied by the sigmoid of a gate (Qwen3-Next).

    In `wqkv` a query head is followed by its gate.
    """

    def forward(self, x_BsD: Tensor, context: Context) -> Tensor:
        """See `Attention`."""
        made = self._gemm(x_BsD, context)
        heads = context.recompute.checkpoint(Recompute.attn_core, self._gated_core, made, context)
        return self.out(heads, context.sink)

    def gated_heads(self, x_BsD: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return `heads`, and the factors on their outputs: B × S × N·H."""
        qkv, gate = self._parts(self._gemm(x_BsD, context))
        return *self._heads(qkv, context), gate.sigmoid()

    def _gated_core(self, made: Tensor, context: Context) -> Tensor:
        qkv, gate = self._parts(made)
        return self._core(qkv, context) * gate.sigmoid()

    def _parts(self, made: Tensor) -> tuple[Tensor, Tensor]:
        """Split what the projection has made: queries, keys and values; gates."""
        heads = made.unflatten(-1, (self.num_kv_heads, -1, self.spec.width))
        queries, kv = heads.split((2 * self.queries_per_kv, 2), dim=-2)
        q, gate = queries.unflatten(-2, (-1, 2)).unbind(-2)
        return torch.cat((q, kv), dim=-2).flatten(-3), gate.flatten(-3)


class PlusOneGatedAttention(PlusOneAttention, GatedAttention):
    """Gated attention whose norms of heads are scaled by 1 + their weights (Qwen3-Next)."""


class AttentionWithSinks(Attention):
    """Attention with a learnt sink per query head of this rank (GPT-OSS, arXiv 2508.10925)."""

    def __init__(self, spec: AttentionSpec, layer_groups: LayerGroups = ALONE) -> None:
        super().__init__(spec, layer_groups)
        weight = AttentionWeights.of(spec).sinks
        assert weight is not None
        self.sinks = nn.Parameter(torch.empty(layer_groups.coords.shape(weight)))
        self.attended = attended_heads(len(self.sinks), layer_groups)

    def with_sinks(self, context: Context) -> Context:
        """Return the context of attention to whole sequences by all of this rank's heads."""
        return replace(context, attend=with_sinks(context.attend, self.sinks))

    def _core(self, qkv: Tensor, context: Context) -> Tensor:
        attend = with_sinks(context.attend, self.sinks[self.attended])
        return super()._core(qkv, replace(context, attend=attend))


class AttentionWithSinksAndOutBias(AttentionWithSinks, AttentionWithOutBias):
    """Attention of GPT-OSS."""


def _norm(weights: NormWeights | None, eps: float) -> nn.Module:
    return nn.Identity() if weights is None else RMSNorm(weights, eps)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed with complete heads.

    Every rank computes the latents of its own tokens; the up-projections are sharded by heads and
    gather the tokens first. Positions rotate the last R values of a query head, and one rotary key
    that all heads share; both store pairs as neighbours. Values are padded to the width of keys,
    because the deterministic kernels and the all-to-all of context parallelism take one width.
    """

    def __init__(
        self, spec: AttentionSpec, mla: MLAConfig, layer_groups: LayerGroups = ALONE
    ) -> None:
        super().__init__()
        self.spec = spec
        self.mla = mla
        self.layer_groups = layer_groups
        weights = LatentAttentionWeights.of(spec, mla)
        self.q_a = None if weights.q_a is None else ColumnParallelLinear(weights.q_a, layer_groups)
        self.q_a_norm = _norm(weights.q_a_norm, spec.eps)
        self.q_b = ColumnParallelLinear(weights.q_b, layer_groups)
        self.kv_a = ColumnParallelLinear(weights.kv_a, layer_groups)
        self.kv_a_norm = RMSNorm(weights.kv_a_norm, spec.eps)
        self.kv_b = ColumnParallelLinear(weights.kv_b, layer_groups)
        self.wo = RowParallelLinear(weights.wo, layer_groups)

    def forward(self, x_BsD: Tensor, context: Context) -> Tensor:
        """Map B × s × D -> B × s × D, without the residual."""
        q, latent_BsL, key_BSR = self.projected(x_BsD, context)
        kv = self.kv_b.forward(latent_BsL, context.sink)
        heads = context.recompute.checkpoint(
            Recompute.attn_core, self._core, q, kv, key_BSR, context
        )
        return self.wo.forward(heads, context.sink)

    def projected(self, x_BsD: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return the projections before rotation: queries B × S × N·H, the normalised latent of
        this rank's own tokens B × s × L, the rotary key B × S × R.
        """
        sink = context.sink
        latent = x_BsD if self.q_a is None else self.q_a_norm(self.q_a.forward(x_BsD, sink), sink)
        q = self.q_b.forward(latent, sink)
        latent_BsL, key_BsR = self.kv_a.forward(x_BsD, sink).split(
            (self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=-1
        )
        return q, self.kv_a_norm(latent_BsL, sink), gather_tokens(key_BsR, self.layer_groups.tp)

    def queries(self, q: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Split query heads into the unrotated and the rotated part: B × S × N × … each."""
        q_BSNH = q.unflatten(-1, (-1, self.mla.key_width))
        plain, rotated = q_BSNH.split(
            (self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim), dim=-1
        )
        return plain, self._rotated(rotated, context)

    def shared_key(self, key_BSR: Tensor, context: Context) -> Tensor:
        """Return the rotated key that all heads share: B × S × 1 × R."""
        return self._rotated(key_BSR[:, :, None], context)

    def heads(
        self, q: Tensor, kv: Tensor, key_BSR: Tensor, context: Context
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of every head, B × S × N × H each; values are padded."""
        mla = self.mla
        q_BSNH = torch.cat(self.queries(q, context), dim=-1)
        both = kv.unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        plain, v_BSNV = both.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        shared_BS1R = self.shared_key(key_BSR, context)
        k_BSNH = torch.cat((plain, shared_BS1R.expand(-1, -1, plain.shape[2], -1)), dim=-1)
        return q_BSNH, k_BSNH, F.pad(v_BSNV, (0, mla.key_width - mla.v_head_dim))

    def _core(self, q: Tensor, kv: Tensor, key_BSR: Tensor, context: Context) -> Tensor:
        q_BSNH, k_BSNH, v_BSNH = self.heads(q, kv, key_BSR, context)
        out_BSNH = attend_all(
            q_BSNH,
            k_BSNH,
            v_BSNH,
            context=context,
            layer_groups=self.layer_groups,
            window=self.spec.window,
            scale=self.spec.scale,
        )
        return out_BSNH[..., : self.mla.v_head_dim].flatten(2)

    def _rotated(self, x_BSNR: Tensor, context: Context) -> Tensor:
        """Apply rotary positions to neighbouring pairs and return them in two halves.

        Queries and keys get the same order, so that their dot products are unchanged.
        """
        assert self.spec.rope is not None, "refused by rules"
        return rotate(interleaved_to_halves(x_BSNR), context.rotary[self.spec.rope])
