"""Configuration of latent attention and rotary positions; the attention of one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.config.bounds import above_zero, at_least
from app.errors import ConfigError
from app.hashed import hashed_once


@dataclass(frozen=True)
class YarnConfig:
    """YaRN: rotary positions for longer sequences than in pre-training.

    Peng et al. 2023, arXiv 2309.00071, with DeepSeek's factor on the softmax.
    """

    factor: float = 40.0  # new length over original_length
    original_length: int = 4096  # tokens of a sequence in pre-training
    # frequencies with more turns than this within original_length are unchanged
    beta_fast: float = 32.0
    beta_slow: float = 1.0  # frequencies with fewer turns are divided by the factor
    mscale: float = 1.0  # growth of queries and keys with the factor's logarithm
    # growth of the softmax scale, which also covers values that are not rotated
    mscale_all_dim: float = 1.0
    # factor on cosines and sines; null: growth(mscale) / growth(mscale_all_dim)
    attention_factor: float | None = None
    truncate: bool = True  # round the pairs between which frequencies are interpolated

    def __post_init__(self) -> None:
        section = "model.yarn"
        at_least(section, self, 1, "factor", "original_length")
        above_zero(section, self, "beta_fast", "beta_slow", "attention_factor")
        at_least(section, self, 0, "mscale", "mscale_all_dim")
        if self.beta_fast < self.beta_slow:
            rule = f"must be at least beta_slow={self.beta_slow}"
            raise ConfigError(
                f"{section}.beta_fast", self.beta_fast, rule, nearest=2 * self.beta_slow
            )

    def growth(self, mscale: float) -> float:
        """Return 0.1 · mscale · ln(factor) + 1."""
        return 0.1 * mscale * math.log(self.factor) + 1

    @property
    def growth_of_heads(self) -> float:
        """Factor on rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return self.growth(self.mscale) / self.growth(self.mscale_all_dim)


@dataclass(frozen=True)
class Llama3RopeConfig:
    """Llama 3.1's rotary positions for longer sequences than in pre-training (arXiv 2407.21783).

    Low frequencies are divided by a factor, high ones are unchanged.
    """

    factor: float = 8.0  # divisor of low frequencies
    original_length: int = 8192  # tokens of a sequence in pre-training
    low_turns: float = 1.0  # frequencies with fewer turns within original_length are divided
    # frequencies with more turns are unchanged; those in between are interpolated
    high_turns: float = 4.0

    def __post_init__(self) -> None:
        section = "model.llama3_rope"
        at_least(section, self, 1, "factor", "original_length")
        above_zero(section, self, "low_turns", "high_turns")
        if self.high_turns <= self.low_turns:
            rule = f"must be above low_turns={self.low_turns}"
            near = 4 * self.low_turns
            raise ConfigError(f"{section}.high_turns", self.high_turns, rule, nearest=near)


@dataclass(frozen=True)
class LongRopeConfig:
    """LongRoPE (arXiv 2402.13753): frequencies divided by one list of factors up to the length of
    pre-training, and by another in longer sequences.
    """

    original_length: int = 4096  # tokens of a sequence in pre-training
    # divisor of each frequency, fastest first, of a sequence of at most original_length; empty: 1
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()  # of a longer one
    factor: float = 32.0  # longest length over original_length
    # factor on cosines and sines; null: √(1 + ln(factor) / ln(original_length))
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        section = "model.longrope"
        at_least(section, self, 2, "original_length")
        above_zero(section, self, "factor", "attention_factor")
        for name in ("short_factors", "long_factors"):
            factors = tuple(map(float, getattr(self, name)))
            object.__setattr__(self, name, factors)
            if not all(0 < each < math.inf for each in factors):
                rule = "has others than finite numbers above 0"
                raise ConfigError(f"{section}.{name}", factors, rule, nearest="[]")

    def factors(self, length: int) -> tuple[float, ...]:
        """Return the divisors of frequencies in sequences of `length` tokens; empty: 1."""
        return self.long_factors if length > self.original_length else self.short_factors

    @property
    def growth_of_heads(self) -> float:
        """Factor on rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))


@dataclass(frozen=True)
class DynamicRopeConfig:
    """Rotary positions whose base grows with a sequence beyond its length in pre-training (dynamic
    NTK-aware scaling, arXiv 2309.00071, appendix B).
    """

    factor: float = 2.0  # new length over original_length, nearly
    original_length: int = 4096  # tokens of a sequence in pre-training

    def __post_init__(self) -> None:
        at_least("model.dynamic_rope", self, 1, "factor", "original_length")

    def base(self, theta: float, width: int, length: int) -> float:
        """Return the base in sequences of `length` tokens, with heads of rotated width `width`."""
        growth = self.factor * max(1, length / self.original_length) - (self.factor - 1)
        return float(theta * growth ** (width / (width - 2)))


@hashed_once
@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values of all heads are projected from one narrow latent per token; separate components
    of queries and keys are rotated.
    """

    # width of the queries' latent; null: projected from hidden states
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512  # width of the latent of keys and values
    qk_nope_head_dim: int = 128  # width of a query or key head without rotary positions
    # rotated width of a query head, and of the one rotary key that all heads share
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128  # width of a value head; at most that of a key head
    # epsilon of the norms of both latents, 1e-6 in DeepSeek's models; null: model.norm_eps
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        section = "model.mla"
        at_least(section, self, 1, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        at_least(section, self, 2, "qk_rope_head_dim")
        above_zero(section, self, "norm_eps")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"{section}.qk_rope_head_dim",
                self.qk_rope_head_dim,
                "rotary positions need an even width",
                nearest=self.qk_rope_head_dim + 1,
            )
        if self.v_head_dim > self.key_width:
            raise ConfigError(
                f"{section}.v_head_dim",
                self.v_head_dim,
                f"at most qk_nope_head_dim + qk_rope_head_dim = {self.key_width}, as kernels take "
                "values padded to the width of keys",
                nearest=self.key_width,
            )

    @property
    def key_width(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Gated delta net (Yang et al. 2024, arXiv 2412.06464) in layers of type linear_attention.

    Each value head sums up the tokens before in a state of key_head_dim × value_head_dim.
    """

    key_heads: int = 16  # heads of queries and of keys
    value_heads: int = 32  # heads of values; those of one key head are neighbours
    key_head_dim: int = 128  # width of a query or key head
    value_head_dim: int = 128  # width of a value head
    conv_width: int = 4  # tokens that a short convolution sees, the present one included

    def __post_init__(self) -> None:
        section = "model.linear_attention"
        at_least(section, self, 1, "key_heads", "value_heads", "key_head_dim", "value_head_dim")
        at_least(section, self, 2, "conv_width")
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"{section}.value_heads",
                self.value_heads,
                f"must be a multiple of key_heads={self.key_heads}",
                nearest=-(-self.value_heads // self.key_heads) * self.key_heads,
            )

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Values of a token in the convolution: queries, keys and values of all heads."""
        return self.key_heads * (2 * self.key_head_dim + self.values_per_key * self.value_head_dim)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of a model: rotated width of a head, and frequencies, which at most one
    section scales.
    """

    width: int
    theta: float  # base of the frequencies
    yarn: YarnConfig | None = None  # null: frequencies unscaled, or scaled by others
    llama3: Llama3RopeConfig | None = None  # null: unscaled, or scaled by others
    longrope: LongRopeConfig | None = None  # null: unscaled, or scaled by others
    dynamic: DynamicRopeConfig | None = None  # null: unscaled, or scaled by others
    factor: float = 1.0  # divisor of all frequencies

    @property
    def original_length(self) -> int | None:
        """Tokens of a sequence beyond which frequencies are others; None: the same in all."""
        scaling = self.longrope or self.dynamic
        return None if scaling is None else scaling.original_length


@hashed_once
@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of one layer.

    A value without torch: modules, KV caches and plans of a layer read it, and layers with equal
    specs compute the same. What layers may differ in is a field here.
    """

    hidden: int  # width of the residual stream
    heads: int  # query heads
    kv_heads: int  # key and value heads
    width: int  # of a query or key head
    rope: Rope | None  # None: no rotary positions
    window: int | None  # tokens that a query sees, itself included; None means all before it
    scale: float | None  # factor on the scores; None means 1 / √width
    qk_norm: bool  # RMSNorm on each query and key head
    qk_norm_whole: bool  # one RMSNorm over all query or key heads together instead
    qkv_bias: bool
    softcap: float | None  # scores s become c · tanh(s / c); None: as they are
    norm_plus_one: bool  # norms of heads are scaled by 1 + their weight
    out_bias: bool  # on the output projection
    sinks: bool  # a learnt logit per query head in the softmax's denominator
    eps: float  # of norms of heads, or of latents
    gate: bool = False  # heads' outputs are multiplied by the sigmoid of a projection
    mla: MLAConfig | None = None  # None: grouped-query attention, or `linear`
    # linear attention instead of a softmax over scores; fields that it has no use for are None,
    # False or of the model's other layers
    linear: LinearAttentionConfig | None = None

    @property
    def value_width(self) -> int:
        """Width of one value head."""
        return self.width if self.mla is None else self.mla.v_head_dim

    def cached_tokens(self, tokens: int) -> int:
        """Return how many tokens of a sequence of `tokens` a KV cache holds: those that a window
        reaches.
        """
        return tokens if self.window is None else min(self.window, tokens)

    def cached_bytes(self, tokens: int, tp: int, size: int) -> int:
        """Return the bytes of a sequence of `tokens` in a cache on one of `tp` ranks, with elements
        of `size` bytes.

        These are keys and values of its heads; with MLA the latent and the rotary key, which every
        tensor-parallel rank has; with linear attention the fp32 state and the convolution's last
        inputs, whatever the tokens.
        """
        linear = self.linear
        if linear is not None:
            state = linear.value_heads * linear.key_head_dim * linear.value_head_dim
            return (4 * state + (linear.conv_width - 1) * linear.channels * size) // tp
        if self.mla is not None:
            width = self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        else:
            width = 2 * (self.kv_heads // tp) * self.width
        return self.cached_tokens(tokens) * width * size
