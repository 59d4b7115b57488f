"""Architecture: layers, widths and experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from app.choices import (
    Balance,
    CloneAlgorithm,
    DispatcherKind,
    DropPolicy,
    LayerType,
    Score,
    StaticCapacity,
    StaticOverflow,
    StaticTransport,
)
from app.config.attention import AttentionSpec, Llama3RopeConfig, MLAConfig, Rope, YarnConfig
from app.config.bounds import above_zero, at_least, finite
from app.errors import ConfigError, FirstOf, Instead, nearest_divisors

# a capacity of StaticConfig is a multiple of this: whole tiles of the grouped GEMM
ROUNDED_ROWS = 128


@dataclass(frozen=True)
class StaticConfig:
    """Options of `dispatcher=static`."""

    transport: StaticTransport = StaticTransport.auto  # transport of tokens between ranks
    capacity: StaticCapacity = StaticCapacity.worst  # dispatched tokens that a rank has memory for
    factor: float = 1.5  # capacity=factor: capacity over the mean number of dispatched tokens
    # reaction to two steps in a row that exceeded the capacity
    on_overflow: StaticOverflow = StaticOverflow.grow
    # memory for dispatched tokens saved for backward, over their mean; null: the full capacity
    paged_buffer: float | None = None

    def __post_init__(self) -> None:
        at_least("model.moe.static", self, 1, "factor", "paged_buffer")


@dataclass(frozen=True)
class EchoConfig:
    """Elastic cloning of hot experts (docs/moe.md), for dispatcher=static."""

    spares: int = 0  # slots of a rank for clones (replicas) of other ranks' experts; 0: off
    # algorithm that picks the experts to clone, and where
    algorithm: CloneAlgorithm = CloneAlgorithm.target_search
    # tokens that a clone must take off the fullest rank, over the mean; with the other algorithms:
    # load above the mean, over the mean, from which a rank's experts are cloned
    threshold: float = 0.05
    check: bool = False  # stop if a token's choices or a plan's totals do not add up; costs time

    def __post_init__(self) -> None:
        at_least("model.moe.echo", self, 0, "spares", "threshold")


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers of a model."""

    num_experts: int = 8  # routed experts per MoE layer
    top_k: int = 2  # experts per token
    ffn_hidden_size: int = 256  # hidden width of one expert
    every_n: int = 1  # every n-th layer is MoE, counted after the first dense ones
    first_k_dense: int = 0  # leading layers that stay dense
    shared_ffn_hidden_size: int = 0  # hidden width of the shared expert; 0: none
    shared_gate: bool = False  # scale the shared expert by a learned sigmoid gate per token
    score: Score = Score.softmax  # scores from logits
    # softmax over all experts before the top-k instead of over the chosen ones after it
    pre_softmax: bool = False
    groups: int | None = None  # expert groups for group-limited routing
    topk_groups: int | None = None  # groups kept per token
    # best scores of a group that are added up to its score: 1 as in DeepSeek-V2; null: top_k /
    # topk_groups, which is 2 in DeepSeek-V3
    group_best: int | None = None
    routed_scale: float | None = None  # factor on the chosen probabilities
    expert_bias: bool = False  # biases on all projections of routed experts (GPT-OSS)
    logit_bias: bool = False  # a learned bias on the router's logits (GPT-OSS)
    # routed experts compute (up + 1) · gate · sigmoid(swiglu_alpha · gate), with gate at most this
    # and up between −this and this (GPT-OSS); null: silu(gate) · up
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None  # null: 1.702 with a swiglu_limit
    # divide a token's chosen sigmoid scores by their sum; null: only where top_k > 1
    norm_topk_prob: bool | None = None
    # most tokens of an expert from one rank, over the mean; null: dropless
    capacity_factor: float | None = None
    # which tokens stay when an expert has more than its capacity
    drop_policy: DropPolicy = DropPolicy.probs
    # pad every expert to its capacity, so that sizes are static and the host never waits
    pad_to_capacity: bool = False
    aux_loss_coeff: float = 0.01  # weight of the load-balancing loss; 0: off
    # tokens over which the load-balancing loss evens the load
    balance: Balance = Balance.microbatch
    z_loss_coeff: float = 0.0  # weight of the router z-loss; 0: off
    # update rate of the bias added to sigmoid scores for selection; 0: off
    bias_update_rate: float = 0.0
    # multiply the router's input by uniform(1 − eps, 1 + eps) in training; 0: off
    jitter_eps: float = 0.0
    # for benchmarks only: round-robin routing, whatever the router says
    force_balance: bool = False
    dispatcher: DispatcherKind = DispatcherKind.auto  # transport of tokens to experts
    static: StaticConfig = field(default_factory=StaticConfig)  # options of dispatcher=static
    # clones (replicas) of hot experts on other ranks
    echo: EchoConfig = field(default_factory=EchoConfig)
    # on a GPU compute the shared expert while tokens travel to the routed ones
    shared_overlap: bool = False
    # load of the busiest expert-parallel rank, over the mean, that memory is planned for
    planned_imbalance: float = 1.5

    def __post_init__(self) -> None:
        at_least(
            "model.moe",
            self,
            1,
            "num_experts",
            "top_k",
            "ffn_hidden_size",
            "every_n",
            "groups",
            "topk_groups",
            "group_best",
        )
        at_least("model.moe", self, 0, "first_k_dense", "shared_ffn_hidden_size")
        at_least("model.moe", self, 0, "aux_loss_coeff", "z_loss_coeff", "bias_update_rate")
        at_least("model.moe", self, 1, "planned_imbalance")
        finite("model.moe", self, "routed_scale", "capacity_factor", "jitter_eps")
        above_zero("model.moe", self, "swiglu_limit", "swiglu_alpha")
        if self.swiglu_alpha is not None and self.swiglu_limit is None:
            rule = "is of the clamped activation, and swiglu_limit=null has none"
            either = ("null", Instead("model.moe.swiglu_limit=7.0"))
            raise ConfigError("model.moe.swiglu_alpha", self.swiglu_alpha, rule, nearest=either)
        if not 0 <= self.jitter_eps < 1:
            near = 0 if self.jitter_eps < 0 else 0.99
            raise ConfigError(
                "model.moe.jitter_eps",
                self.jitter_eps,
                "must be at least 0 and below 1",
                nearest=near,
            )
        if self.top_k > self.num_experts:
            raise ConfigError(
                "model.moe.top_k",
                self.top_k,
                f"only num_experts={self.num_experts} to choose from",
                nearest=self.num_experts,
            )
        for name in ("shared_gate", "shared_overlap"):
            if getattr(self, name) and not self.shared_ffn_hidden_size:
                raise ConfigError(
                    f"model.moe.{name}",
                    True,
                    "needs a shared expert, shared_ffn_hidden_size > 0",
                    nearest=False,
                )
        if self.top_k == 1 and self.score is Score.softmax and not self.pre_softmax:
            rule = "softmax over the one chosen expert is always 1, so the router would not learn"
            raise ConfigError(
                "model.moe.top_k", 1, rule, nearest=(2, Instead("model.moe.pre_softmax=true"))
            )
        if self.norm_topk_prob is not None and self.score is not Score.sigmoid:
            rule = "applies to score=sigmoid; pre_softmax says whether softmax scores add up to 1"
            either = ("null", Instead("model.moe.score=sigmoid"))
            raise ConfigError("model.moe.norm_topk_prob", self.norm_topk_prob, rule, nearest=either)
        if self.bias_update_rate and self.score is not Score.sigmoid:
            raise ConfigError(
                "model.moe.bias_update_rate",
                self.bias_update_rate,
                "the bias only selects for score=sigmoid",
                nearest=(0, Instead("model.moe.score=sigmoid")),
            )
        self._check_capacity()
        self._check_groups()

    @property
    def normalizes_sigmoids(self) -> bool:
        """True if a token's chosen sigmoid scores are divided by their sum."""
        if self.score is not Score.sigmoid:
            return False
        return self.top_k > 1 if self.norm_topk_prob is None else self.norm_topk_prob

    @property
    def activation_alpha(self) -> float:
        """Factor on the gate within the sigmoid of the clamped activation."""
        return 1.702 if self.swiglu_alpha is None else self.swiglu_alpha

    def _check_capacity(self) -> None:
        if self.pad_to_capacity and self.dispatcher is DispatcherKind.static:
            rule = "dispatcher=static has static sizes anyway"
            raise ConfigError("model.moe.pad_to_capacity", True, rule, nearest=False)
        if self.capacity_factor is not None:
            if self.capacity_factor <= 0:
                raise ConfigError(
                    "model.moe.capacity_factor",
                    self.capacity_factor,
                    "must be above 0",
                    nearest=(1.0, None),
                )
            return
        needs = "needs a capacity, and capacity_factor=null sets none"
        with_capacity = Instead("model.moe.capacity_factor=1.0")
        if self.pad_to_capacity:
            raise ConfigError(
                "model.moe.pad_to_capacity", True, needs, nearest=(False, with_capacity)
            )
        if self.drop_policy is not DropPolicy.probs:
            raise ConfigError(
                "model.moe.drop_policy", self.drop_policy, needs, nearest=("probs", with_capacity)
            )

    def _check_groups(self) -> None:
        if (self.groups is None) != (self.topk_groups is None):
            rule = f"groups={self.groups}: set both or neither"
            both = (None if self.groups is None else 1,)
            raise ConfigError("model.moe.topk_groups", self.topk_groups, rule, nearest=both)
        if self.groups is None or self.topk_groups is None:
            if self.group_best is not None:
                rule = "needs expert groups, and groups=null has none"
                raise ConfigError("model.moe.group_best", self.group_best, rule, nearest=("null",))
            return
        if self.num_experts % self.groups:
            near = nearest_divisors(self.groups, self.num_experts)
            raise ConfigError(
                "model.moe.groups",
                self.groups,
                f"must divide num_experts={self.num_experts}",
                nearest=near,
            )
        if self.group_best is not None and self.group_best > self.num_experts // self.groups:
            raise ConfigError(
                "model.moe.group_best",
                self.group_best,
                "more than the experts of a group",
                nearest=self.num_experts // self.groups,
            )
        if self.topk_groups > min(self.groups, self.top_k):
            raise ConfigError(
                "model.moe.topk_groups",
                self.topk_groups,
                f"at most groups={self.groups} and top_k={self.top_k}",
                nearest=min(self.groups, self.top_k),
            )
        if self.top_k > self.topk_groups * (self.num_experts // self.groups):
            raise ConfigError(
                "model.moe.top_k",
                self.top_k,
                "more than the experts in the kept groups",
                nearest=self.topk_groups * (self.num_experts // self.groups),
            )


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What decoder layers may differ in; layers with equal specs have equal weights and costs."""

    attention: AttentionSpec
    routed: bool  # has routed experts instead of a dense feed-forward


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
    yarn: YarnConfig | None = None  # null: rotary frequencies unscaled, or scaled by llama3_rope
    llama3_rope: Llama3RopeConfig | None = None  # null: unscaled, or scaled by yarn
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    qk_norm: bool = False  # RMSNorm on each query and key head before the rotation
    # one RMSNorm over all query or key heads together (OLMoE), not one per head
    qk_norm_whole: bool = False
    qkv_bias: bool = False  # a bias on queries, keys and values (Qwen2)
    attn_out_bias: bool = False  # a bias on the output projection of attention (GPT-OSS)
    # a learnt logit per query head that takes part in the denominator of the softmax (GPT-OSS)
    sinks: bool = False
    # tokens that a query sees in layers of type sliding_attention, itself included; null: no such
    # layer
    sliding_window: int | None = None
    # attention of each layer, or a shorter pattern that repeats over the layers; empty:
    # sliding_attention everywhere with a sliding_window, full_attention without
    layer_types: tuple[LayerType, ...] = ()
    # of each layer, or a shorter pattern that repeats: 1 with rotary positions, 0 without
    # (SmolLM3); empty: all layers have them
    no_rope_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False  # share one matrix between embedding and head
    init_std: float = 0.02  # standard deviation of the initial weights
    # Hugging Face model whose weights a new run starts from, a folder or a name on the hub; null:
    # random weights
    init_from: str | None = None
    mla: MLAConfig | None = None  # null: grouped-query attention
    moe: MoEConfig | None = None  # null: every layer is dense

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
        above_zero("model", self, "rope_theta", "norm_eps", "init_std")
        if self.moe and self.moe.first_k_dense >= self.num_layers:
            rule = f"leaves none of the {self.num_layers} layers for experts"
            raise ConfigError(
                "model.moe.first_k_dense", self.moe.first_k_dense, rule, nearest=self.num_layers - 1
            )
        if self.yarn is not None and self.rope_theta <= 1:
            rule = "YaRN needs frequencies that fall from pair to pair, so a base above 1"
            raise ConfigError("model.rope_theta", self.rope_theta, rule, nearest=10000.0)
        if self.yarn is not None and self.llama3_rope is not None:
            rule = "cannot be combined with model.yarn: both scale the rotary frequencies"
            raise ConfigError("model.llama3_rope", "{…}", rule, nearest=("null",))
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

    def _check_layer_types(self) -> None:
        types, window = self.layer_types, self.sliding_window
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

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Decoder layers in order; equal ones are one object."""
        kinds: dict[LayerSpec, LayerSpec] = {}
        listed = (
            LayerSpec(self._attention(layer), self.is_moe_layer(layer))
            for layer in range(self.num_layers)
        )
        return tuple(kinds.setdefault(spec, spec) for spec in listed)

    def _attention(self, layer: int) -> AttentionSpec:
        types = self.layer_types
        slides = not types or types[layer % len(types)] is LayerType.sliding_attention
        rotates = self.no_rope_layers or (1,)
        return AttentionSpec(
            hidden=self.hidden_size,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            width=self.head_width,
            rope=self.rope if rotates[layer % len(rotates)] else None,
            window=self.sliding_window if slides else None,
            scale=self.softmax_scale,
            qk_norm=self.qk_norm,
            qk_norm_whole=self.qk_norm_whole,
            qkv_bias=self.qkv_bias,
            out_bias=self.attn_out_bias,
            sinks=self.sinks,
            eps=self.norm_eps if self.mla is None else self.latent_eps,
            mla=self.mla,
        )

    @property
    def rope(self) -> Rope:
        """Rotary positions of its attention."""
        width = self.head_width if self.mla is None else self.mla.qk_rope_head_dim
        return Rope(width, self.rope_theta, self.yarn, self.llama3_rope)

    @property
    def softmax_scale(self) -> float | None:
        """Factor on attention scores; None means 1 / √(width of a key head)."""
        if self.yarn is None:
            return None
        return self.yarn.growth(self.yarn.mscale_all_dim) ** 2 / math.sqrt(self.head_width)

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether decoder layer `layer` (from 0) has routed experts."""
        moe = self.moe
        return (
            moe is not None
            and layer >= moe.first_k_dense
            and (layer - moe.first_k_dense) % moe.every_n == 0
        )
