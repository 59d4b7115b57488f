"""Experts: routing, dispatch and clones."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.choices import (
    Balance,
    CloneAlgorithm,
    DispatcherKind,
    DropPolicy,
    Score,
    StaticCapacity,
    StaticOverflow,
    StaticTransport,
)
from app.config.bounds import above_zero, at_least, finite
from app.errors import ConfigError, Instead, nearest_divisors
from app.hashed import hashed_once

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


@hashed_once
@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers of a model."""

    num_experts: int = 8  # routed experts per MoE layer
    top_k: int = 2  # experts per token
    ffn_hidden_size: int = 256  # hidden width of one expert
    every_n: int = 1  # every n-th layer is MoE, counted after the first dense ones
    first_k_dense: int = 0  # leading layers that stay dense
    dense_layers: tuple[int, ...] = ()  # more layers that stay dense, by number from 0
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
    # update rate of the bias added to scores for selection, but of score=softmax; 0: off
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
        object.__setattr__(self, "dense_layers", tuple(self.dense_layers))
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
        self._check_scores()
        self._check_capacity()
        self._check_groups()

    def _check_scores(self) -> None:
        relative = self.score is Score.softmax and not self.pre_softmax
        one = self.top_k == 1 and (relative or self.score is Score.softmax_bias)
        if one and not self.aux_loss_coeff:
            rule = (
                "softmax over the one chosen expert is always 1, so without a load-balancing loss "
                "the router would not learn"
            )
            raise ConfigError(
                "model.moe.top_k", 1, rule, nearest=(2, Instead("model.moe.pre_softmax=true"))
            )
        if self.norm_topk_prob is not None and self.score is not Score.sigmoid:
            rule = "applies to score=sigmoid; pre_softmax says whether softmax scores add up to 1"
            either = ("null", Instead("model.moe.score=sigmoid"))
            raise ConfigError("model.moe.norm_topk_prob", self.norm_topk_prob, rule, nearest=either)
        if self.bias_update_rate and not self.selects_by_bias:
            raise ConfigError(
                "model.moe.bias_update_rate",
                self.bias_update_rate,
                "score=softmax selects without a bias",
                nearest=(0, Instead("model.moe.score=sigmoid")),
            )

    @property
    def selects_by_bias(self) -> bool:
        """True if a bias takes part in the choice of experts."""
        return self.score is not Score.softmax

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
