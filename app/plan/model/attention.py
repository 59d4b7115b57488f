"""Weights of grouped-query attention and of multi-head latent attention."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import AttentionSpec, MLAConfig
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Initial, Part, Weight


def attention_weights(spec: AttentionSpec) -> AttentionWeights | LatentAttentionWeights:
    """Return the attention weights of one layer, of the kind that its spec has."""
    if spec.mla is not None:
        return LatentAttentionWeights.of(spec, spec.mla)
    return AttentionWeights.of(spec)


@dataclass(frozen=True, slots=True)
class AttentionWeights(Part):
    """Projections in and out with optional biases, sinks, and norms of query and key heads.

    A norm is shared by all heads, or spans all of them (qk_norm_whole).
    """

    # of wqkv; first, as a module registers its own parameters before its children's
    bqkv: Weight | None
    bo: Weight | None  # of wo
    sinks: Weight | None  # a logit per query head
    wqkv: Weight  # per key/value head: its query heads, its key, its value
    wo: Weight
    q_norm: NormWeights | None
    k_norm: NormWeights | None

    @property
    def first(self) -> Weight:
        """The first matrix that reads the layer's hidden states."""
        return self.wqkv

    @classmethod
    def of(cls, spec: AttentionSpec) -> AttentionWeights:
        """Build the weights of one layer."""
        hidden = spec.hidden
        width = spec.width
        of_head = NormWeights.of(width, plus_one=spec.norm_plus_one)
        q_norm = k_norm = of_head if spec.qk_norm else None
        if spec.qk_norm_whole:
            q_norm = NormWeights.of(spec.heads * width, tp=0)
            k_norm = NormWeights.of(spec.kv_heads * width, tp=0)
        rows = (spec.heads + 2 * spec.kv_heads) * width
        queries = spec.heads // spec.kv_heads  # per key/value head
        bias = Weight((rows,), tp=0, initial=Initial.zeros, decay=False, linear=False)
        of_out = Weight((hidden,), initial=Initial.zeros, decay=False, linear=False)
        return cls(
            bqkv=bias if spec.qkv_bias else None,
            bo=of_out if spec.out_bias else None,
            sinks=Weight((spec.heads,), tp=0, decay=False, linear=False) if spec.sinks else None,
            wqkv=Weight((rows, hidden), tp=0, fused=(queries * width, width, width)),
            wo=Weight((hidden, spec.heads * width), tp=1, initial=Initial.residual),
            q_norm=q_norm,
            k_norm=k_norm,
        )


@dataclass(frozen=True, slots=True)
class LatentAttentionWeights(Part):
    """Multi-head latent attention (DeepSeek-V2).

    Projections to latents are whole on every tensor-parallel rank; projections from latents to
    heads are divided.
    """

    q_a: Weight | None  # to the queries' latent; None: queries are projected from hidden states
    q_a_norm: NormWeights | None
    q_b: Weight  # per head: the part without rotary positions, then the rotated part
    kv_a: Weight  # to the latent of keys and values, then to the rotary key that all heads share
    kv_a_norm: NormWeights  # of the latent
    kv_b: Weight  # per head: its key without the rotary part, then its value
    wo: Weight

    @property
    def first(self) -> Weight:
        """The first matrix that reads the layer's hidden states."""
        return self.q_a or self.q_b

    @classmethod
    def of(cls, spec: AttentionSpec, mla: MLAConfig) -> LatentAttentionWeights:
        """Build the weights of one layer."""
        hidden, heads, rank = spec.hidden, spec.heads, mla.q_lora_rank
        query = mla.qk_nope_head_dim, mla.qk_rope_head_dim
        latent = mla.kv_lora_rank, mla.qk_rope_head_dim
        key_value = mla.qk_nope_head_dim, mla.v_head_dim
        return cls(
            q_a=None if rank is None else Weight((rank, hidden)),
            q_a_norm=None if rank is None else NormWeights.of(rank),
            q_b=Weight((heads * sum(query), rank or hidden), tp=0, fused=query),
            kv_a=Weight((sum(latent), hidden), fused=latent),
            kv_a_norm=NormWeights.of(mla.kv_lora_rank),
            kv_b=Weight((heads * sum(key_value), mla.kv_lora_rank), tp=0, fused=key_value),
            wo=Weight((hidden, heads * mla.v_head_dim), tp=1, initial=Initial.residual),
        )
