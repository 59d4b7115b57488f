"""Architecture: layers, widths and experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from app.choices import (
    ActivationKind,
    BlockKind,
    LayerType,
    NormKind,
)
from app.config.attention import (
    AttentionSpec,
    DynamicRopeConfig,
    LinearAttentionConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    MLAConfig,
    Rope,
    YarnConfig,
)
from app.config.bounds import above_zero, at_least
from app.config.experts import MoEConfig
from app.errors import ConfigError, FirstOf, Instead, nearest_divisors
from app.hashed import hashed_once

# numbers of a model that are above 0
ABOVE_ZERO = ("rope_theta", "local_rope_theta", "norm_eps", "init_std", "query_pre_attn_scalar",
              "attention_softcap", "residual_scale", "logit_scale", "logit_softcap")  # fmt: skip
SCALINGS = ("yarn", "llama3_rope", "longrope", "dynamic_rope")  # of rotary frequencies
RARE_SECTIONS = (*SCALINGS, "mtp")  # all of whose keys are advanced
# keys, in any section, that weigh a loss of training against others
LOSS_WEIGHTS = frozenset(("aux_loss_coeff", "z_loss_coeff", "loss_weight"))
TRAINING_ALONE = {"init_from": None, "mtp": {"layers": 0}}  # for use: values that leave it out


@hashed_once
@dataclass(frozen=True)
class LayerSpec:
    """Kind of a decoder layer; layers with equal specs have equal weights and costs."""

    attention: AttentionSpec
    routed: bool  # has routed experts instead of a dense feed-forward
    predicts: bool = False  # predicts a further token, behind the decoder's layers

    @property
    def follows(self) -> bool:
        """True if a layer reads the output of the layer before, as it is."""
        return not self.predicts


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """Multi-token prediction: layers behind the decoder, each of which predicts one more token
    ahead (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """

    layers: int = 0  # tokens predicted beyond the next one, each by a layer of its own
    # factor λ on the mean of their losses, which is added to the loss of the next token
    loss_weight: float = 0.1

    def __post_init__(self) -> None:
        at_least("model.mtp", self, 0, "layers")
        above_zero("model.mtp", self, "loss_weight")


@hashed_once
@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    RMSNorm, rotary positions, grouped-query or latent attention, SwiGLU.
    """

    name: str = "model"  # shown in logs and run folders
    num_layers: int = 4  # decoder layers
    hidden_size: int = 128  # width of the residual stream
    ffn_hidden_size: int = 512  # hidden width of dense feed-forward layers
    num_heads: int = 4  # query heads
    num_kv_heads: int = 2  # key and value heads
    head_dim: int | None = None  # width of a head; null: hidden_size / num_heads
    vocab_size: int = 264  # rows of the embedding; at least the tokenizer's
    rope_theta: float = 10000.0  # base of the rotary frequencies
    # leading values of a query or key head that are rotated; null: all
    rotary_dim: int | None = None
    linear_rope_factor: float = 1.0  # divisor of all rotary frequencies (linear scaling)
    # base of the rotary frequencies, unscaled, of layers of type sliding_attention among others;
    # null: the same frequencies in all layers
    local_rope_theta: float | None = None
    yarn: YarnConfig | None = None  # null: rotary frequencies unscaled, or scaled by others
    llama3_rope: Llama3RopeConfig | None = None  # null: unscaled, or scaled by others
    longrope: LongRopeConfig | None = None  # null: unscaled, or scaled by others
    dynamic_rope: DynamicRopeConfig | None = None  # null: unscaled, or scaled by others
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    # place of norms and residual connections in a layer
    block: BlockKind = BlockKind.norm_before
    norm: NormKind = NormKind.rms  # of norms over hidden states
    # of the gate of dense feed-forwards; of the up projection without one
    activation: ActivationKind = ActivationKind.silu
    mlp_gate: bool = True  # dense feed-forwards are down(act(gate) · up); false: down(act(up))
    qk_norm: bool = False  # RMSNorm on each query and key head before the rotation
    # one RMSNorm over all query or key heads together (OLMoE), not one per head
    qk_norm_whole: bool = False
    # attention scores are divided by its root; null: width of a head
    query_pre_attn_scalar: float | None = None
    # attention scores s become c · tanh(s / c) with this c (Gemma 2); null: as they are
    attention_softcap: float | None = None
    qkv_bias: bool = False  # a bias on queries, keys and values (Qwen2)
    attn_out_bias: bool = False  # a bias on the output projection of attention (GPT-OSS)
    # biases on all projections of dense feed-forwards and shared experts (Llama's mlp_bias)
    mlp_bias: bool = False
    # a learnt logit per query head that takes part in the denominator of the softmax (GPT-OSS)
    sinks: bool = False
    # heads' outputs are multiplied by the sigmoid of a projection of hidden states (Qwen3-Next)
    attention_gate: bool = False
    # tokens that a query sees in layers of type sliding_attention, itself included; null: no such
    # layer
    sliding_window: int | None = None
    # attention of each layer, or a shorter pattern that repeats over the layers; empty:
    # sliding_attention everywhere with a sliding_window, full_attention without
    layer_types: tuple[LayerType, ...] = ()
    # of each layer, or a shorter pattern that repeats: 1 with rotary positions, 0 without
    # (SmolLM3); empty: all layers have them
    no_rope_layers: tuple[int, ...] = ()
    embedding_scale: float | None = None  # factor on embeddings; 0: √hidden_size; null: 1
    # factor on outputs of attention and feed-forwards where the residual is added; null: 1
    residual_scale: float | None = None
    logit_scale: float | None = None  # factor on the logits; null: 1
    # logits l become c · tanh(l / c) with this c, after logit_scale; null: as they are
    logit_softcap: float | None = None
    tie_embeddings: bool = False  # share one matrix between embedding and head
    init_std: float = 0.02  # standard deviation of the initial weights
    # Hugging Face model whose weights a new run starts from, a folder or a name on the hub; null:
    # random weights
    init_from: str | None = None
    mla: MLAConfig | None = None  # null: grouped-query attention
    # of layers of type linear_attention; null: no such layer
    linear_attention: LinearAttentionConfig | None = None
    moe: MoEConfig | None = None  # null: every layer is dense
    mtp: MTPConfig = MTPConfig()  # layers that predict further tokens

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "no_rope_layers", tuple(self.no_rope_layers))
        at_least(
            "model",
            self,
            1,
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "sliding_window",
        )
        above_zero("model", self, *ABOVE_ZERO)
        at_least("model", self, 0, "embedding_scale")
        if self.moe and self.moe.first_k_dense >= self.num_layers:
            rule = f"leaves none of the {self.num_layers} layers for experts"
            raise ConfigError(
                "model.moe.first_k_dense", self.moe.first_k_dense, rule, nearest=self.num_layers - 1
            )
        self._check_dense_layers()
        self._check_scaling()
        if self.qk_norm_whole and not self.qk_norm:
            rule = "needs norms of queries and keys, and model.qk_norm=false has none"
            near = (False, Instead("model.qk_norm=true"))
            raise ConfigError("model.qk_norm_whole", True, rule, nearest=near)
        self._check_layer_types()
        self._check_no_rope_layers()
        if self.mla is not None:
            self._check_latent()
        elif self.head_dim is None and self.hidden_size % self.num_heads:
            width = max(2, self.hidden_size // self.num_heads // 2 * 2)
            raise ConfigError(
                "model.num_heads",
                self.num_heads,
                f"must divide hidden_size={self.hidden_size} unless head_dim is set",
                nearest=(
                    *nearest_divisors(self.num_heads, self.hidden_size),
                    Instead(f"model.head_dim={width}"),
                ),
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.num_kv_heads",
                self.num_kv_heads,
                f"must divide num_heads={self.num_heads}",
                nearest=nearest_divisors(self.num_kv_heads, self.num_heads),
            )
        if self.mla is None and self.head_width % 2:
            raise ConfigError(
                "model.head_dim",
                self.head_width,
                "rotary positions need an even head width",
                nearest=self.head_width + 1,
            )
        self._check_rotary_dim()
        self._check_scaled_width()

    def _check_scaling(self) -> None:
        if self.yarn is not None and self.rope_theta <= 1:
            rule = "YaRN needs frequencies that fall from pair to pair, so a base above 1"
            raise ConfigError("model.rope_theta", self.rope_theta, rule, nearest=10000.0)
        at_least("model", self, 1, "linear_rope_factor")
        linear = self.linear_rope_factor
        used = [name for name in SCALINGS if getattr(self, name) is not None]
        more = ["linear_rope_factor"] if used and linear != 1 else []
        for name in (*used[1:], *more):
            rule = f"cannot be combined with model.{used[0]}: both scale the rotary frequencies"
            value, near = ("{…}", ("null",)) if name in used else (linear, 1.0)
            raise ConfigError(f"model.{name}", value, rule, nearest=near)

    def _check_rotary_dim(self) -> None:
        width, key = self.rotary_dim, "model.rotary_dim"
        if width is None:
            return
        if self.mla is not None:
            rule = "multi-head latent attention rotates model.mla.qk_rope_head_dim values"
            raise ConfigError(key, width, rule, nearest=("null",))
        if not 2 <= width <= self.head_width:
            rule = f"must be 2 to the width of a head, {self.head_width}"
            raise ConfigError(key, width, rule, nearest=2 if width < 2 else self.head_width)
        if width % 2:
            raise ConfigError(key, width, "rotary positions need an even width", nearest=width - 1)

    def _check_scaled_width(self) -> None:
        pairs = self.rope.width // 2
        if self.dynamic_rope is not None and pairs < 2:
            rule = "needs more than one pair of rotated values in a head"
            raise ConfigError("model.dynamic_rope", "{…}", rule, nearest=("null",))
        for name in ("short_factors", "long_factors") if self.longrope is not None else ():
            if (factors := getattr(self.longrope, name)) and len(factors) != pairs:
                rule = f"has {len(factors)} factors, and heads have {pairs} pairs of rotated values"
                raise ConfigError(f"model.longrope.{name}", factors, rule, nearest=("[]",))

    def _check_dense_layers(self) -> None:
        if self.moe is None or not self.moe.dense_layers:
            return
        key, listed = "model.moe.dense_layers", self.moe.dense_layers
        if not all(0 <= layer < self.num_layers for layer in listed):
            rule = f"has others than the layers 0 to {self.num_layers - 1}"
            fits = tuple(layer for layer in listed if 0 <= layer < self.num_layers)
            raise ConfigError(key, listed, rule, nearest=(fits or "[]",))
        if not any(map(self.is_moe_layer, range(self.num_layers))):
            rule = f"leaves none of the {self.num_layers} layers for experts"
            raise ConfigError(key, listed, rule, nearest=("[]",))

    def _check_layer_types(self) -> None:
        types, window = self.layer_types, self.sliding_window
        self._check_linear()
        near: tuple[object, ...]
        slides = LayerType.sliding_attention in types
        if slides and window is None:
            rule = "layer_types has sliding_attention, which needs a number of tokens"
            near = (4096, Instead("model.layer_types=[]"))
            raise ConfigError("model.sliding_window", None, rule, nearest=near)
        if types and not slides and window is not None:
            rule = f"has no sliding_attention that would use model.sliding_window={window}"
            near = ("[]", Instead("model.sliding_window=null"))
            raise ConfigError("model.layer_types", types, rule, nearest=near)
        if len(types) > self.num_layers:
            rule = f"has more entries than the num_layers={self.num_layers} layers"
            first = types[: self.num_layers]
            fits = [first] if slides == (LayerType.sliding_attention in first) else []
            near = (FirstOf(fits), Instead(f"model.num_layers={len(types)}"))
            raise ConfigError("model.layer_types", types, rule, nearest=near)

    def _check_linear(self) -> None:
        types, linear = self.layer_types, LayerType.linear_attention
        key = "model.linear_attention"
        near: tuple[object, ...]
        if linear in types and self.linear_attention is None:
            rule = (
                "layer_types has linear_attention, whose sizes only some options of model have, as "
                "model=qwen3_next_80b_a3b"
            )
            near = (Instead("model.layer_types=[]"),)
            raise ConfigError(key, None, rule, nearest=near)
        if self.linear_attention is not None and linear not in types[: self.num_layers]:
            rule = "no layer has linear_attention: model.layer_types"
            raise ConfigError(key, "{…}", rule, nearest=("null",))
        if self.attention_gate:
            for name in ("mla", "sinks", "attn_out_bias", "qkv_bias", "attention_softcap"):
                if (held := getattr(self, name)) not in (None, False):
                    rule = "cannot be combined with model.attention_gate"
                    value, off = ("{…}", "null") if name == "mla" else (held, False)
                    off = "null" if name == "attention_softcap" else off
                    near = (off, Instead("model.attention_gate=false"))
                    raise ConfigError(f"model.{name}", value, rule, nearest=near)

    def _check_no_rope_layers(self) -> None:
        key, rotates = "model.no_rope_layers", self.no_rope_layers
        if set(rotates) - {0, 1}:
            rule = "has numbers besides 1, with rotary positions, and 0, without"
            near = tuple(int(each != 0) for each in rotates)
            raise ConfigError(key, rotates, rule, nearest=(near, "[]"))
        if len(rotates) > self.num_layers:
            rule = f"has more entries than the num_layers={self.num_layers} layers"
            enough = Instead(f"model.num_layers={len(rotates)}")
            raise ConfigError(key, rotates, rule, nearest=(rotates[: self.num_layers], enough))
        if self.mla is not None and 0 in rotates:
            rule = "multi-head latent attention has rotary positions in every layer"
            raise ConfigError(key, rotates, rule, nearest="[]")

    def _check_latent(self) -> None:
        needs = "multi-head latent attention has widths of its own, model.mla.*"
        if self.head_dim is not None:
            raise ConfigError("model.head_dim", self.head_dim, needs, nearest=("null",))
        if self.qk_norm:
            rule = "multi-head latent attention has norms on its latents"
            raise ConfigError("model.qk_norm", True, rule, nearest=False)
        for key, what in (("qkv_bias", "biases"), ("attn_out_bias", "biases"), ("sinks", "sinks")):
            if getattr(self, key):
                rule = f"multi-head latent attention has no {what}"
                raise ConfigError(f"model.{key}", True, rule, nearest=False)
        if self.num_kv_heads != self.num_heads:
            raise ConfigError(
                "model.num_kv_heads",
                self.num_kv_heads,
                f"multi-head latent attention has keys and values for each of num_heads="
                f"{self.num_heads} heads",
                nearest=self.num_heads,
            )

    def check_frozen(self, key: str) -> None:
        """Raise ConfigError if the model trains all parameters or none; `key` freezes some."""
        if self.mtp.layers:
            rule = "multi-token prediction is trained with all parameters"
            rule = f"{rule}, and {key} leaves some out"
            raise ConfigError("model.mtp.layers", self.mtp.layers, rule, nearest=0)

    @property
    def head_width(self) -> int:
        """Width of one query or key head."""
        if self.mla is not None:
            return self.mla.key_width
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def latent_eps(self) -> float:
        """Epsilon of the norms of MLA latents."""
        own = None if self.mla is None else self.mla.norm_eps
        return self.norm_eps if own is None else own

    @property
    def layers_behind(self) -> int:
        """Layers behind the decoder's, all on the last stage, that training alone needs."""
        return self.mtp.layers

    @property
    def all_layers(self) -> range:
        """Decoder layers, then those behind them."""
        return range(self.num_layers + self.layers_behind)

    def with_behind(self, other: ModelConfig) -> ModelConfig:
        """Return the model with the layers behind the decoder's that another one has."""
        return replace(self, mtp=other.mtp)

    @property
    def copies_embedding(self) -> bool:
        """Return whether the last stage has a copy of the first one's embedding."""
        return self.tie_embeddings or self.mtp.layers > 0

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """All layers in order; equal ones are one object."""
        kinds: dict[LayerSpec, LayerSpec] = {}
        found: dict[tuple[LayerType, bool, bool, bool], LayerSpec] = {}  # by what layers differ in

        def spec(layer: int) -> LayerSpec:
            predicts = layer >= self.num_layers
            own = min(layer, self.num_layers - 1)
            kind, rotates, routed = *self._place(own), self.is_moe_layer(layer)
            key = kind, rotates, routed, predicts
            if key not in found:
                made = LayerSpec(self._attention(kind, rotates), routed, predicts)
                found[key] = kinds.setdefault(made, made)
            return found[key]

        return tuple(map(spec, self.all_layers))

    def _place(self, layer: int) -> tuple[LayerType, bool]:
        """Return the type of a layer, and whether it has rotary positions."""
        types, rotates = self.layer_types, self.no_rope_layers or (1,)
        kind = types[layer % len(types)] if types else LayerType.sliding_attention
        return kind, bool(rotates[layer % len(rotates)])

    def _attention(self, kind: LayerType, rotates: bool) -> AttentionSpec:
        slides = kind is LayerType.sliding_attention
        rope = self.rope
        if slides and self.local_rope_theta is not None:
            rope = Rope(rope.width, self.local_rope_theta)
        spec = AttentionSpec(
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            width=self.head_width,
            rope=rope if rotates else None,
            window=self.sliding_window if slides else None,
            scale=self.softmax_scale,
            qk_norm=self.qk_norm,
            qk_norm_whole=self.qk_norm_whole,
            qkv_bias=self.qkv_bias,
            softcap=self.attention_softcap,
            norm_plus_one=self.norm is NormKind.rms_plus_one,
            out_bias=self.attn_out_bias,
            sinks=self.sinks,
            eps=self.norm_eps if self.mla is None else self.latent_eps,
            gate=self.attention_gate,
            mla=self.mla,
        )
        if kind is not LayerType.linear_attention:
            return spec
        return replace(spec, rope=None, mla=None, sinks=False, linear=self.linear_attention)

    @property
    def rope(self) -> Rope:
        """Rotary positions of its attention; of layers without a window if they have their own."""
        heads = self.rotary_dim or self.head_width
        return Rope(
            heads if self.mla is None else self.mla.qk_rope_head_dim,
            self.rope_theta,
            self.yarn,
            self.llama3_rope,
            longrope=self.longrope,
            dynamic=self.dynamic_rope,
            factor=self.linear_rope_factor,
        )

    @property
    def embedding_factor(self) -> float:
        """Factor on embeddings."""
        if self.embedding_scale is None:
            return 1.0
        return self.embedding_scale or math.sqrt(self.hidden_size)

    @property
    def residual_factor(self) -> float:
        """Factor on outputs that are added to the residual stream."""
        return 1.0 if self.residual_scale is None else self.residual_scale

    @property
    def softmax_scale(self) -> float | None:
        """Factor on attention scores; None means 1 / √(width of a key head)."""
        growth = 1.0 if self.yarn is None else self.yarn.growth(self.yarn.mscale_all_dim) ** 2
        scalar = self.query_pre_attn_scalar or self.head_width
        return None if growth == 1 and scalar == self.head_width else growth / math.sqrt(scalar)

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether decoder layer `layer` (from 0) has routed experts."""
        moe = self.moe
        return (
            moe is not None
            and layer >= moe.first_k_dense
            and (layer - moe.first_k_dense) % moe.every_n == 0
            and layer not in moe.dense_layers
        )
