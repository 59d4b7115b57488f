"""Mapping of the work to GPUs: ranks, schedule, recomputation, CUDA graphs, element types."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.choices import (
    CpComm,
    Dtype,
    Fp8Part,
    Fp8Recipe,
    GraphImpl,
    GraphKey,
    GraphScope,
    LinearBackendKind,
    Offload,
    Recompute,
    ScheduleName,
)
from app.config.bounds import above_zero, at_least
from app.config.profile import HardwareProfile
from app.errors import ConfigError, Instead
from app.hashed import hashed_once

GPU_MEMORY_GIB = 79.1  # usable memory of an 80 GB H100


@hashed_once
@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism, and the split of layers over pipeline ranks."""

    # processes; null: from the launcher, or tp · cp · pp · dp
    world_size: int | None = None
    tp: int = 1  # ranks that share each matrix of dense layers
    cp: int = 1  # ranks that share each sequence
    cp_comm_type: CpComm = CpComm.all_gather  # communication between these ranks in attention
    pp: int = 1  # pipeline ranks
    # data-parallel replicas; null: world_size / (tp · cp · pp)
    dp: int | None = None
    ep: int = 1  # ranks that share the experts of a layer
    etp: int | None = None  # ranks that share each matrix of an expert; null: tp
    order: str = "tp-cp-ep-dp-pp"  # axes from the fastest-varying over global ranks
    vpp: int = 1  # pipeline stages per rank
    first: int | None = None  # layers of the first pipeline rank; null: as many as the others
    last: int | None = None  # layers of the last pipeline rank; null: as many as the others
    layout: str | None = None  # every stage spelled out, like Et*3|(tt|)*2L; also sets vpp
    count_embedding: bool = False  # the embedding counts as one layer
    count_head: bool = False  # the head and its loss count as one layer
    gpus_per_node: int = 8  # ranks per node, joined by its fast links
    # if a launcher starts more or fewer ranks than these degrees have, choose others
    # (docs/reliability.md)
    elastic: bool = False
    # set where others were chosen: overrides that take them back, which a resumed run does
    replaced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "replaced", tuple(self.replaced))
        at_least(
            "parallel",
            self,
            1,
            "world_size",
            "tp",
            "cp",
            "pp",
            "dp",
            "ep",
            "etp",
            "vpp",
            "first",
            "last",
            "gpus_per_node",
        )


@hashed_once
@dataclass(frozen=True)
class HardwareConfig:
    """The GPUs that plans are made for.

    null: those of an H100, or in training what the GPU itself reports.
    """

    gpu_memory_gib: float | None = None  # memory of one GPU, GiB
    peak_tflops: float | None = None  # dense bf16 peak of one GPU, TFLOP/s
    efficiency: float = 0.4  # share of the peak that compute is assumed to reach
    node_gb_s: float = 280.0  # bandwidth of one GPU to others of its node, one direction, GB/s
    network_gb_s: float = 45.0  # bandwidth of one GPU to other nodes, one direction, GB/s
    # measured speeds; null: plans use the data sheet's, times `efficiency`
    profile: HardwareProfile | None = None

    def __post_init__(self) -> None:
        above_zero(
            "hardware",
            self,
            "gpu_memory_gib",
            "peak_tflops",
            "efficiency",
            "node_gb_s",
            "network_gb_s",
        )
        if self.profile is not None and self.peak_tflops is not None:
            self.profile.check_peak(self.peak_tflops)

    @property
    def memory(self) -> int:
        """Bytes of one GPU's memory."""
        return int((self.gpu_memory_gib or GPU_MEMORY_GIB) * 2**30)


@dataclass(frozen=True)
class ScheduleConfig:
    """Order of forwards and backwards within a step."""

    name: ScheduleName = ScheduleName.auto
    # microbatches that pass a chunk before the next chunk's turn (interleaved); null: pp
    group_size: int | None = None
    overlap_p2p: bool = True  # overlap send/recv between stages with compute
    # batch all sends and receives of one point in the schedule (batch_isend_irecv)
    batch_p2p: bool = True
    # seconds in one operation after which a rank counts as stuck and the run ends; a warning comes
    # after 20 s, or a quarter of it (docs/cluster.md)
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        at_least("schedule", self, 1, "group_size")
        above_zero("schedule", self, "timeout_s")


@dataclass(frozen=True)
class RecomputeConfig:
    """Activations that are recomputed in backward instead of saved."""

    full: bool = False  # every layer from its input
    phases: tuple[Recompute, ...] = ()  # parts of each layer
    # with full: microbatches in flight that recompute only `phases`
    partial_microbatches: int = 0
    # parts of each layer whose saved activations wait for backward in pinned host memory
    offload: tuple[Offload, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        object.__setattr__(self, "offload", tuple(self.offload))
        at_least("recompute", self, 0, "partial_microbatches")
        if self.partial_microbatches and not self.full:
            rule = "lets some microbatches save more, so it needs recompute.full=true"
            raise ConfigError(
                "recompute.partial_microbatches", self.partial_microbatches, rule, nearest=0
            )


@hashed_once
@dataclass(frozen=True)
class CudaGraphConfig:
    """CUDA graph capture."""

    impl: GraphImpl = GraphImpl.none
    scope: tuple[GraphScope, ...] = ()  # parts of a layer for partial graphs; empty: whole layers
    warmup_steps: int = 3  # steps of this process before capture
    key: GraphKey = GraphKey.microbatch  # what owns a set of partial graphs
    optimizer: bool = False  # include the optimizer update in the full-iteration graph
    # graphs write to host memory how far they are, so that a hang within one is named
    marks: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "scope", tuple(self.scope))
        at_least("cuda_graph", self, 1, "warmup_steps")

    @property
    def of_parts(self) -> bool:
        """True if graphs hold parts of layers and are replayed for every microbatch."""
        return self.impl in (GraphImpl.local, GraphImpl.transformer_engine)


# Keys of precision.fp8 that only recipe=delayed reads, and keys that every recipe reads. Set
# without that recipe they are refused; other keys may stay set when FP8 is turned off.
OF_DELAYED = ("amax_history", "margin")
OF_ALL = ("first_layers", "last_layers")


@dataclass(frozen=True)
class Fp8Config:
    """FP8 GEMMs of linear layers and experts (docs/fp8.md)."""

    recipe: Fp8Recipe | None = None  # scaling of matrices; null: no FP8
    include: tuple[Fp8Part, ...] = (Fp8Part.linear,)  # linear layers that run in FP8
    first_layers: int = 0  # first layers that stay in 16 bits
    last_layers: int = 0  # last layers that stay in 16 bits
    amax_history: int = 16  # steps of the amax history (recipe=delayed)
    # with recipe=delayed: headroom over the amax history, in powers of two
    margin: int = 0
    backend: LinearBackendKind = LinearBackendKind.auto  # library that computes them

    def __post_init__(self) -> None:
        object.__setattr__(self, "include", tuple(self.include))
        at_least("precision.fp8", self, 0, "first_layers", "last_layers", "margin")
        at_least("precision.fp8", self, 1, "amax_history")
        if self.recipe is None:
            rule = "recipe=null turns FP8 off"
            self._refuse(rule, "current", *OF_ALL)
            self._refuse(rule, "delayed", *OF_DELAYED)
        elif self.recipe is not Fp8Recipe.delayed:
            rule = f"recipe={self.recipe.value} keeps no history of largest entries"
            self._refuse(rule, "delayed", *OF_DELAYED)
        if self.recipe is not None and not self.include:
            rule = f"precision.fp8.recipe={self.recipe.value} needs layers to apply to"
            near = ("[linear]", Instead("precision.fp8.recipe=null"))
            raise ConfigError("precision.fp8.include", self.include, rule, nearest=near)

    def _refuse(self, why: str, recipe: str, *names: str) -> None:
        """Raise ConfigError for the first of these keys that is set although nothing reads it."""
        for name in names:
            value, usual = getattr(self, name), getattr(Fp8Config, name)
            if value != usual:
                near = (usual, Instead(f"precision.fp8.recipe={recipe}"))
                rule = f"is not read: {why}"
                raise ConfigError(f"precision.fp8.{name}", value, rule, nearest=near)

    @property
    def by_library(self) -> bool:
        """True if Transformer Engine has GEMMs to compute: all parts but experts."""
        return self.recipe is not None and set(self.include) != {Fp8Part.experts}


@hashed_once
@dataclass(frozen=True)
class PrecisionConfig:
    """Element types. Main parameters are fp32 in every choice; `optim.moments` is of moments."""

    params: Dtype = Dtype.float32  # parameters and activations
    # main gradients and their reduction: float32, or the type of parameters
    grads: Dtype = Dtype.float32
    # constant loss scale; null: dynamic for float16, otherwise none
    loss_scale: float | None = None
    initial_loss_scale: float = 65536.0  # first dynamic loss scale
    min_loss_scale: float = 1.0  # least dynamic loss scale
    loss_scale_window: int = 1000  # steps without an overflow after which it doubles
    # overflows within a window until it halves, the last one included
    loss_scale_hysteresis: int = 2
    fp8: Fp8Config = field(default_factory=Fp8Config)  # FP8 GEMMs

    def __post_init__(self) -> None:
        above_zero("precision", self, "loss_scale", "initial_loss_scale", "min_loss_scale")
        at_least("precision", self, 1, "loss_scale_window", "loss_scale_hysteresis")
        if self.grads not in (Dtype.float32, self.params):
            rule = f"must be float32 or the type of parameters, {self.params.value}"
            raise ConfigError("precision.grads", self.grads, rule, nearest="float32")
        if self.min_loss_scale > self.initial_loss_scale:
            rule = f"must be at most precision.initial_loss_scale={self.initial_loss_scale}"
            raise ConfigError(
                "precision.min_loss_scale",
                self.min_loss_scale,
                rule,
                nearest=self.initial_loss_scale,
            )
