"""Parameters of a stage on one rank, in the engine's order, and their layout in buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod

from app.choices import OptimizerKind
from app.config import LoraConfig, ModelConfig, OptimConfig
from app.plan.layout import ParallelLayout
from app.plan.model.stage import stage_weights
from app.plan.model.weight import Weight
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.optimizers import optimizer_of
from app.plan.shards import BufferLayout, buffer_layout
from app.plan.stages import Stage

ALIGN = 64  # elements: parameters start at addresses that vector loads and grouped GEMMs accept
# elements: large enough to saturate the links, also with many ranks
BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Parameter:
    """One rank's part of a parameter."""

    name: str  # global name, the same in every layout
    shape: tuple[int, ...]
    expert: bool  # belongs to routed experts
    tied: bool = False  # another stage holds a copy
    frozen: bool = False  # not trained: in no buffer
    # its record; None in a list made by hand, whose parameters AdamW updates
    weight: Weight | None = field(default=None, compare=False)

    def optimizer(self, optim: OptimConfig) -> OptimizerKind:
        """Return the optimizer that updates it."""
        return OptimizerKind.adamw if self.weight is None else optimizer_of(self.weight, optim)

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """Layouts of a chunk's two buffers; None without such parameters."""

    dense: BufferLayout | None  # shared by the ranks of dp and cp
    expert: BufferLayout | None  # shared by the ranks of edp


def chunk_parameters(
    model: ModelConfig,
    stage: Stage,
    layout: ParallelLayout,
    frozen: Collection[str] = (),
    lora: LoraConfig | None = None,
) -> tuple[Parameter, ...]:
    """Return the parameters of a stage on each of its ranks, in order of use (`stage_weights`).

    `frozen`: names of those that are not trained (`app.plan.sharding.frozen.frozen_in`); `lora`:
    the run's adapters.
    """
    coords = ShardCoords.of(layout, 0)  # shapes are equal on every rank
    return tuple(
        Parameter(
            each.name,
            coords.shape(each.weight),
            each.weight.expert,
            tied=each.tied,
            frozen=each.name in frozen,
            weight=each.weight,
        )
        for each in stage_weights(model, stage, lora)
    )


def chunk_buffers(
    parameters: Sequence[Parameter], layout: ParallelLayout, optim: OptimConfig
) -> ChunkBuffers:
    """Return the layout of a chunk's trained parameters, as the optimizer shards them.

    A tied parameter has a bucket of its own, so that its shards are the same on both stages.
    """
    trained = [parameter for parameter in parameters if not parameter.frozen]
    dense = [parameter for parameter in trained if not parameter.expert]
    expert = [parameter for parameter in trained if parameter.expert]
    return ChunkBuffers(
        _aligned(dense, layout.dp * layout.cp, optim), _aligned(expert, layout.edp, optim)
    )


def _aligned(
    parameters: Sequence[Parameter], world: int, optim: OptimConfig
) -> BufferLayout | None:
    if not parameters:
        return None
    # several buckets gain nothing without overlap
    together = world == 1 or not (optim.overlap_grads or optim.overlap_params)
    bucket = None if together else optim.bucket_numel or max(BUCKET, BUCKET_PER_RANK * world)
    numels = [parameter.numel for parameter in parameters]
    tied = [place for place, parameter in enumerate(parameters) if parameter.tied]
    return buffer_layout(
        numels,
        world,
        bucket_numel=bucket,
        param_align=ALIGN,
        shard_align=ALIGN,
        alone=tied,
        optimizers=[parameter.optimizer(optim) for parameter in parameters],
    )
