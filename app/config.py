"""The whole option surface as frozen dataclasses, with each field's unit in its comment.

Pure Python: no torch, no Hydra, no environment. `app.cli.compose` fills these types from the YAML groups in
`conf/`. Every section checks itself in `__post_init__`; what spans sections is one small function in `app.rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from app.choices import (
    Decay,
    Device,
    DispatcherKind,
    Dtype,
    GraphImpl,
    Normalize,
    Ramp,
    ScheduleName,
    Score,
    Source,
    WandbMode,
    WsdDecay,
)
from app.errors import ConfigError, nearest_divisors


def above_zero(section: str, config: object, *names: str) -> None:
    """Refuse any of the named fields that is not positive, offering its default; None means unset and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{section}.{name}", value, "must be above 0", getattr(type(config), name))


def at_least(section: str, config: object, low: float, *names: str) -> None:
    """Refuse any of the named fields that is below `low`; None means unset and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{section}.{name}", value, f"must be at least {low}", low)


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
    pre_softmax: bool = False  # softmax over all experts before the top-k instead of over the chosen ones after
    groups: int | None = None  # expert groups for group-limited routing
    topk_groups: int | None = None  # groups kept per token
    routed_scale: float | None = None  # factor on the chosen probabilities
    aux_loss_coeff: float = 0.01  # weight of the load-balancing loss; 0: off
    z_loss_coeff: float = 0.0  # weight of the router z-loss; 0: off
    bias_update_rate: float = 0.0  # step of the balancing bias added to sigmoid scores for selection; 0: off
    dispatcher: DispatcherKind = DispatcherKind.auto  # transport of tokens to experts

    def __post_init__(self) -> None:
        at_least("model.moe", self, 1, "num_experts", "top_k", "ffn_hidden_size", "every_n", "groups", "topk_groups")
        at_least("model.moe", self, 0, "first_k_dense", "shared_ffn_hidden_size")
        at_least("model.moe", self, 0, "aux_loss_coeff", "z_loss_coeff", "bias_update_rate")
        if self.top_k > self.num_experts:
            raise ConfigError(
                "model.moe.top_k", self.top_k, f"only num_experts={self.num_experts} to choose from", self.num_experts
            )
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise ConfigError("model.moe.shared_gate", True, "needs a shared expert, shared_ffn_hidden_size > 0", False)
        if self.top_k == 1 and self.score is Score.softmax and not self.pre_softmax:
            rule = "softmax over the one chosen expert is always 1, so the router would not learn"
            raise ConfigError("model.moe.top_k", 1, rule, "2, or pre_softmax=true")
        if self.bias_update_rate and self.score is not Score.sigmoid:
            raise ConfigError(
                "model.moe.bias_update_rate",
                self.bias_update_rate,
                "the bias only selects for score=sigmoid",
                "0, or score=sigmoid",
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if (self.groups is None) != (self.topk_groups is None):
            raise ConfigError("model.moe.topk_groups", self.topk_groups, f"groups={self.groups}: set both or neither")
        if self.groups is None or self.topk_groups is None:
            return
        if self.num_experts % self.groups:
            near = nearest_divisors(self.groups, self.num_experts)
            raise ConfigError("model.moe.groups", self.groups, f"must divide num_experts={self.num_experts}", near)
        if self.topk_groups > min(self.groups, self.top_k):
            raise ConfigError(
                "model.moe.topk_groups",
                self.topk_groups,
                f"at most groups={self.groups} and top_k={self.top_k}",
                min(self.groups, self.top_k),
            )
        if self.top_k > self.topk_groups * (self.num_experts // self.groups):
            raise ConfigError(
                "model.moe.top_k",
                self.top_k,
                "more than the experts in the kept groups",
                self.topk_groups * (self.num_experts // self.groups),
            )


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    name: str = "model"  # shown in logs and run folders
    num_layers: int = 4  # decoder layers
    hidden_size: int = 128  # width of the residual stream
    ffn_hidden_size: int = 512  # hidden width of dense feed-forward layers
    num_heads: int = 4  # query heads
    num_kv_heads: int = 2  # key and value heads
    head_dim: int | None = None  # width of a head; null: hidden_size / num_heads
    vocab_size: int = 264  # rows of the embedding; at least the tokenizer's
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    qk_norm: bool = False  # RMSNorm on each query and key head before the rotation
    tie_embeddings: bool = False  # one matrix for embedding and head
    init_std: float = 0.02  # standard deviation of the initial weights
    moe: MoEConfig | None = None  # null: every layer is dense

    def __post_init__(self) -> None:
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
        )
        above_zero("model", self, "rope_theta", "norm_eps", "init_std")
        if self.moe and self.moe.first_k_dense >= self.num_layers:
            rule = f"leaves none of the {self.num_layers} layers for experts"
            raise ConfigError("model.moe.first_k_dense", self.moe.first_k_dense, rule, self.num_layers - 1)
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                "model.num_heads",
                self.num_heads,
                f"must divide hidden_size={self.hidden_size} unless head_dim is set",
                nearest_divisors(self.num_heads, self.hidden_size),
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "model.num_kv_heads",
                self.num_kv_heads,
                f"must divide num_heads={self.num_heads}",
                nearest_divisors(self.num_kv_heads, self.num_heads),
            )
        if self.head_width % 2:
            raise ConfigError("model.head_dim", self.head_width, "rotary positions need an even head width", self.head_width + 1)

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_heads

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has routed experts."""
        moe = self.moe
        return moe is not None and layer >= moe.first_k_dense and (layer - moe.first_k_dense) % moe.every_n == 0


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism."""

    world_size: int | None = None  # processes; null: from the launcher, or dp
    dp: int | None = None  # data-parallel replicas; null: world_size
    ep: int = 1  # ranks that share the experts of a layer

    def __post_init__(self) -> None:
        at_least("parallel", self, 1, "world_size", "dp", "ep")


@dataclass(frozen=True)
class ScheduleConfig:
    """Order of forwards and backwards within a step."""

    name: ScheduleName = ScheduleName.none


@dataclass(frozen=True)
class CudaGraphConfig:
    """CUDA graph capture."""

    impl: GraphImpl = GraphImpl.none


@dataclass(frozen=True)
class PrecisionConfig:
    """Element types. Gradients are accumulated and reduced, and parameters updated, in fp32 in every choice."""

    params: Dtype = Dtype.float32  # parameters and activations


@dataclass(frozen=True)
class OptimConfig:
    """AdamW (Loshchilov & Hutter 2019) and its schedules; steps are optimizer updates."""

    lr: float = 3e-3  # peak learning rate
    min_lr: float = 3e-4  # learning rate after decay
    init_lr: float = 0.0  # learning rate at step 0 of warm-up
    warmup_steps: int | None = None  # steps from init_lr to lr; null: a twentieth of the decay steps
    decay: Decay = Decay.cosine  # shape after warm-up
    decay_steps: int | None = None  # step at which min_lr is reached; null: train.steps
    wsd_decay_steps: int | None = None  # last steps of the decay for decay=wsd
    wsd_decay: WsdDecay = WsdDecay.exponential  # shape of those steps
    beta1: float = 0.9  # decay of the first moment per step
    beta2: float = 0.95  # decay of the second moment per step
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled decay of matrices; vectors (norms, biases) have none
    weight_decay_end: float | None = None  # last weight decay; null: constant
    weight_decay_ramp: Ramp = Ramp.constant  # shape between the two over decay_steps
    clip_norm: float = 1.0  # largest global gradient norm; 0: no clipping

    def __post_init__(self) -> None:
        above_zero("optim", self, "lr", "eps")
        at_least("optim", self, 0, "min_lr", "init_lr", "warmup_steps", "weight_decay", "weight_decay_end", "clip_norm")
        at_least("optim", self, 1, "decay_steps", "wsd_decay_steps")
        for name in ("init_lr", "min_lr"):
            if getattr(self, name) > self.lr:
                raise ConfigError(f"optim.{name}", getattr(self, name), f"above the peak optim.lr={self.lr}", self.lr)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name}", getattr(self, name), "must be in [0, 1)", 0.95)
        if self.decay is Decay.wsd and self.wsd_decay_steps is None:
            raise ConfigError(
                "optim.wsd_decay_steps", None, "optim.decay=wsd needs the length of its last part", "a tenth of train.steps"
            )
        if self.weight_decay_end is not None and self.weight_decay_end < self.weight_decay:
            raise ConfigError(
                "optim.weight_decay_end",
                self.weight_decay_end,
                f"below its start optim.weight_decay={self.weight_decay}",
                self.weight_decay,
            )
        if (self.weight_decay_end is not None) != (self.weight_decay_ramp is not Ramp.constant):
            raise ConfigError(
                "optim.weight_decay_ramp",
                self.weight_decay_ramp,
                f"weight_decay_end={self.weight_decay_end}: set both or neither",
                "constant with weight_decay_end=null",
            )


@dataclass(frozen=True)
class DataConfig:
    """Documents, tokens and how they are packed into sequences."""

    source: Source = Source.stdlib  # kind of corpus
    path: Any = ()  # a file or glob, or a list of them, for text, jsonl and parquet; a tuple once checked
    name: str | None = None  # dataset name or local folder for source=hub
    config_name: str | None = None  # the dataset's configuration for source=hub
    split: str = "train"  # the dataset's split for source=hub
    streaming: bool = False  # read while training instead of preparing an arrow cache first (hub)
    text_field: str = "text"  # column that holds the text
    tokenizer: str = "bytes"  # "bytes" or the path of a `tokenizers` JSON file
    validation_fraction: float = 0.1  # share of the documents kept for validation
    validation_documents: int = 100  # documents kept for validation when streaming
    document_mask: bool = False  # attention stays within a document, positions restart with it
    num_proc: int = 1  # processes that tokenize while the cache is prepared
    cache_dir: str | None = None  # folder of the arrow cache; null: the datasets library's own

    def __post_init__(self) -> None:
        paths = (self.path,) if isinstance(self.path, str) else tuple(self.path or ())
        object.__setattr__(self, "path", paths)
        if not all(isinstance(path, str) for path in paths):
            raise ConfigError("data.path", list(paths), "must be a file or glob, or a list of them", "data.path='folder/*'")
        at_least("data", self, 1, "num_proc", "validation_documents")
        files = self.source in (Source.text, Source.jsonl, Source.parquet)
        if files and not self.path:
            raise ConfigError("data.path", "", f"data={self.source.value} needs files or globs", "data.path='folder/*'")
        if self.source is Source.hub and not self.name:
            raise ConfigError("data.name", self.name, "data=hub needs a dataset name or a local folder")
        if self.streaming and self.source is not Source.hub:
            raise ConfigError("data.streaming", True, f"data={self.source.value} is prepared, not streamed", "false, or data=hub")
        if not 0 < self.validation_fraction < 1:
            raise ConfigError("data.validation_fraction", self.validation_fraction, "must be between 0 and 1, both excluded", 0.1)


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and when."""

    interval: int = 100  # steps between checkpoints; 0: none, not even at the end
    keep_last: int = 2  # checkpoints kept; older ones are removed

    def __post_init__(self) -> None:
        at_least("checkpoint", self, 0, "interval")
        at_least("checkpoint", self, 1, "keep_last")


@dataclass(frozen=True)
class LogConfig:
    """Where reports go besides metrics.jsonl."""

    interval: int = 10  # steps between report lines
    console: bool = True  # live progress line
    wandb: bool = True  # a Weights & Biases run
    wandb_mode: WandbMode = WandbMode.offline  # where that run goes
    project: str = "graphfold"  # Weights & Biases project
    group: str | None = None  # Weights & Biases group

    def __post_init__(self) -> None:
        at_least("log", self, 1, "interval")


@dataclass(frozen=True)
class LossConfig:
    """Cross-entropy over next tokens."""

    normalize: Normalize = Normalize.token


@dataclass(frozen=True)
class TrainConfig:
    """Length and batch of the run."""

    steps: int = 700  # optimizer updates
    seq_len: int = 128  # tokens per sequence
    micro_batch: int = 8  # sequences per forward on one rank
    global_batch: int = 16  # sequences per optimizer update over all ranks
    eval_interval: int = 100  # steps between validations; 0: only before the first step and after the last
    eval_sequences: int = 256  # sequences of one validation over all ranks; at least a microbatch each
    sample_tokens: int = 240  # tokens generated when the run ends; 0: none
    seed: int = 1  # of initial weights and data order
    device: Device = Device.auto
    deterministic: bool = True  # equal runs repeat bit for bit; on a GPU this takes slower attention kernels
    gpu_peak_tflops: float | None = None  # dense bf16 peak of one GPU, TFLOP/s; null: known from its name

    def __post_init__(self) -> None:
        at_least("train", self, 1, "steps", "seq_len", "micro_batch", "global_batch", "eval_sequences")
        at_least("train", self, 0, "eval_interval", "sample_tokens", "seed")
        above_zero("train", self, "gpu_peak_tflops")


@dataclass(frozen=True)
class Run:
    """One training run: every choice the user can make."""

    model: ModelConfig = field(default_factory=ModelConfig)  # architecture and sizes
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # degrees of parallelism
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # order of forwards and backwards
    cuda_graph: CudaGraphConfig = field(default_factory=CudaGraphConfig)  # what is captured
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)  # element types
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer and its schedules
    data: DataConfig = field(default_factory=DataConfig)  # documents and tokenizer
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # what is saved and when
    log: LogConfig = field(default_factory=LogConfig)  # where reports go
    loss: LossConfig = field(default_factory=LossConfig)  # how token losses are averaged
    train: TrainConfig = field(default_factory=TrainConfig)  # length and batch
    run_dir: str | None = None  # folder of this run; null: runs/<time>-<model>
    resume: str | None = None  # null: start anew; auto: newest checkpoint; or the path of a checkpoint or run folder

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.parallel.world_size or self.dp

    @property
    def dp(self) -> int:
        """Data-parallel replicas."""
        return self.parallel.dp or self.parallel.world_size or 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step on each data-parallel rank."""
        return self.train.global_batch // (self.train.micro_batch * self.dp)

    @property
    def eval_microbatches(self) -> int:
        """Microbatches of one validation on each data-parallel rank."""
        return max(1, self.train.eval_sequences // (self.train.micro_batch * self.dp))

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        return self.optim.decay_steps or self.train.steps
