"""The whole option surface as frozen dataclasses, with each field's unit in its comment.

Pure Python: no torch, no Hydra, no environment. `app.cli.options.compose` fills these types from
the YAML groups in `conf/`. Every section checks itself in `__post_init__`; a rule that spans
sections is one small function in `app.rules`. `model` has the architecture, `layout` how the work
lies on GPUs, `training` the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from app.config.attention import (
    AttentionSpec,
    DynamicRopeConfig,
    LinearAttentionConfig,
    Llama3RopeConfig,
    LongRopeConfig,
    MLAConfig,
    YarnConfig,
)
from app.config.experts import MoEConfig
from app.config.layout import (
    CudaGraphConfig,
    Fp8Config,
    HardwareConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
)
from app.config.lora import LoraConfig
from app.config.model import LayerSpec, ModelConfig
from app.config.profile import HardwareProfile
from app.config.sweep import SweepConfig
from app.config.training import (
    USUAL_STEPS,
    CheckpointConfig,
    DataConfig,
    LogConfig,
    LossConfig,
    OptimConfig,
    TrainConfig,
)
from app.errors import ConfigError, Instead
from app.hashed import hashed_once

__all__ = [
    "AttentionSpec",
    "CheckpointConfig",
    "CudaGraphConfig",
    "DataConfig",
    "DynamicRopeConfig",
    "Fp8Config",
    "HardwareConfig",
    "HardwareProfile",
    "LayerSpec",
    "LinearAttentionConfig",
    "Llama3RopeConfig",
    "LogConfig",
    "LongRopeConfig",
    "LoraConfig",
    "LossConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "Run",
    "ScheduleConfig",
    "SweepConfig",
    "TrainConfig",
    "YarnConfig",
]


@hashed_once
@dataclass(frozen=True)
class Run:
    """One training run: every choice the user can make."""

    model: ModelConfig = field(default_factory=ModelConfig)  # architecture and sizes
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # degrees of parallelism
    hardware: HardwareConfig = field(default_factory=HardwareConfig)  # GPUs that plans are made for
    # order of forwards and backwards
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    # what is recomputed in backward
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    # what is captured into CUDA graphs
    cuda_graph: CudaGraphConfig = field(default_factory=CudaGraphConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)  # element types
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer and its schedules
    data: DataConfig = field(default_factory=DataConfig)  # documents and tokenizer
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # what is saved and when
    log: LogConfig = field(default_factory=LogConfig)  # where reports go
    loss: LossConfig = field(default_factory=LossConfig)  # how token losses are averaged
    train: TrainConfig = field(default_factory=TrainConfig)  # length and batch
    lora: LoraConfig = field(default_factory=LoraConfig)  # low-rank adapters
    # jobs of a sweep that run side by side
    sweep: SweepConfig = field(default_factory=SweepConfig)
    run_dir: str | None = None  # folder of this run; null: runs/<time>-<model>
    resume: str | None = None  # null: start anew; auto: newest checkpoint that fits; or a path

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Values that other packages derive from this run alone, by name, each made once."""
        return {}

    @property
    def adapters(self) -> LoraConfig | None:
        """The adapters that are trained; None: the model is."""
        return None if self.lora.rank is None else self.lora

    @property
    def freezes(self) -> bool:
        """True if some parameters are not trained."""
        return bool(self.train.frozen) or self.adapters is not None

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.parallel.world_size or self.dp * self.model_ranks

    @property
    def model_ranks(self) -> int:
        """Ranks that share one data-parallel replica of the dense layers."""
        return self.parallel.tp * self.parallel.cp * self.parallel.pp

    @property
    def dp(self) -> int:
        """Data-parallel replicas of the dense layers."""
        return self.parallel.dp or max(1, (self.parallel.world_size or 1) // self.model_ranks)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step on each data-parallel rank."""
        return self.train.global_batch // (self.train.micro_batch * self.dp)

    @property
    def writes_expert_grads(self) -> bool:
        """True if a step's first expert gradients overwrite the main gradients, which saves
        zeroing.

        Not with partial graphs, which replay one kernel for every microbatch, nor if autograd
        accumulates.
        """
        return not self.cuda_graph.of_parts and self.precision.grads is not self.precision.params

    @property
    def eval_microbatches(self) -> int:
        """Microbatches of one validation on each data-parallel rank."""
        return max(1, self.train.eval_sequences // (self.train.micro_batch * self.dp))

    @property
    def steps(self) -> int:
        """Optimizer updates. Raises ConfigError while the data, which decide, are not read."""
        if self.train.steps is None:
            rule = "the number of steps is known when the data are read"
            near = Instead("train.epochs=null", f"train.steps={USUAL_STEPS}")
            raise ConfigError("train.epochs", self.train.epochs, rule, nearest=near)
        return self.train.steps

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum."""
        return self.steps if self.optim.decay_steps is None else self.optim.decay_steps

    @property
    def warmup_steps(self) -> int:
        """Warm-up steps of the learning rate."""
        steps = self.optim.warmup_steps
        return self.decay_steps // 20 if steps is None else steps

    @property
    def wsd_decay_steps(self) -> int:
        """Steps of the final decay of warm-up-stable-decay; 0 if none are given."""
        return self.optim.wsd_decay_steps or 0
