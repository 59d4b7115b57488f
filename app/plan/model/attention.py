"""Weights of grouped-query attention, multi-head latent attention and linear attention."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import AttentionSpec, LinearAttentionConfig, MLAConfig
from app.plan.model.norm import NormWeights
from app.plan.model.weight import Initial, Part, Weight


def attention_weights(spec: AttentionSpec) -> AnyAttentionWeights:
    """Return the attention weights of one layer, of the kind that its spec has."""
    if spec.linear is not None:
        return LinearAttentionWeights.of(spec, spec.linear)
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
    # per key/value head: its query heads, each with its gate if any, its key, its value
    wqkv: Weight
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
        queries = spec.heads // spec.kv_heads  # per key/value head
        fused = ((1 + spec.gate) * queries * width, width, width)
        rows = spec.kv_heads * sum(fused)
        bias = Weight((rows,), tp=0, initial=Initial.zeros, decay=False, linear=False)
        of_out = Weight((hidden,), initial=Initial.zeros, decay=False, linear=False)
        return cls(
            bqkv=bias if spec.qkv_bias else None,
            bo=of_out if spec.out_bias else None,
            sinks=Weight((spec.heads,), tp=0, decay=False, linear=False) if spec.sinks else None,
            wqkv=Weight((rows, hidden), tp=0, fused=fused),
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


@dataclass(frozen=True, slots=True)
class LinearAttentionWeights(Part):
    """Gated delta net (arXiv 2412.06464): all but the norm is divided by key heads."""

    # first, as a module registers its own parameters before its children's
    a_log: Weight  # per value head: logarithm of its rate of decay
    dt_bias: Weight  # per value head
    # per key head the channels of its query, its key, its value heads
    conv: Weight  # channels × tokens, latest last
    w_in: Weight  # per key head: its query, its key, its value heads, their output gates
    w_beta: Weight  # per key head: how much its value heads write, then how much they forget
    norm: NormWeights  # of every value head's output
    w_out: Weight

    @property
    def first(self) -> Weight:
        """The first matrix that reads the layer's hidden states."""
        return self.w_in

    @classmethod
    def of(cls, spec: AttentionSpec, linear: LinearAttentionConfig) -> LinearAttentionWeights:
        """Build the weights of one layer."""
        key, value = linear.key_head_dim, linear.values_per_key * linear.value_head_dim
        heads, values = linear.value_heads, linear.value_heads * linear.value_head_dim
        fused, gates = (2 * key + value, value), 2 * linear.values_per_key

        def of_head(initial: Initial) -> Weight:
            return Weight((heads,), tp=0, initial=initial, decay=False, linear=False)

        return cls(
            a_log=of_head(Initial.log_uniform),
            dt_bias=of_head(Initial.ones),
            conv=Weight(
                (linear.channels, linear.conv_width), tp=0, initial=Initial.kaiming, linear=False
            ),
            w_in=Weight((linear.key_heads * sum(fused), spec.hidden), tp=0, fused=fused),
            w_beta=Weight((linear.key_heads * gates, spec.hidden), tp=0, linear=False),
            norm=NormWeights.of(linear.value_head_dim),
            w_out=Weight((spec.hidden, values), tp=1, initial=Initial.residual),
        )


AnyAttentionWeights = AttentionWeights | LatentAttentionWeights | LinearAttentionWeights
