"""Records of a step: its input, its numbers on the device, and its report; also those of a
validation and of a rollback.

Shapes: B sequences, S tokens per sequence, M microbatches, E experts of a layer, N numbers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from app.collectives import all_reduce
from app.data.feed import Batch
from app.model.block import RoutingReport


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of one step, or of a validation, on this rank's device."""

    batches: tuple[Batch, ...]  # this rank's tokens of each sequence; documents of all
    loss_weights_M: Tensor  # fp32; factor on each microbatch's summed token losses
    routing_weight: float  # factor on each microbatch's router losses
    valid: Tensor  # int64 scalar; tokens with a label in the global batch
    scale: Tensor | None = None  # loss scale, applied where backward starts; None disables it
    # learning rate and weight decay (`update_rates`); None in a validation
    rates_2: Tensor | None = None
    # fp32 scalar: 1 if this process was asked to stop, else 0. None if the host checks only at the
    # update, later and therefore with the latest state
    stop: Tensor | None = None


@dataclass(slots=True)
class StepTotals:
    """Numbers of one step on the device, filled as it runs: those of this rank by its passes, those
    of all ranks (`sum_over`) by the update.
    """

    loss: Tensor | float = 0.0  # weighted token losses, nats
    aux_loss: Tensor | float = 0.0  # weighted balancing losses of all MoE layers
    z_loss: Tensor | float = 0.0  # weighted router z-losses of all MoE layers
    # chunk, n-th MoE layer -> tokens per expert [E]
    counts: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    dropped: Tensor | int = 0  # choices of experts beyond their capacity
    norm_sq: Tensor | float = 0.0  # squared norm of this rank's gradients
    names: tuple[str, ...] = ()  # of the numbers of all ranks
    # these numbers, fp32, in one tensor: one all-reduce sums them, one copy brings them to the host
    over_ranks_N: Tensor | None = None

    def add(self, chunk: int, routing: Sequence[RoutingReport], weight: float) -> None:
        """Count a microbatch's routing in a chunk; `weight`: factor on its router losses."""
        for layer, report in enumerate(routing):
            self.aux_loss = self.aux_loss + report.aux_loss * weight
            self.z_loss = self.z_loss + report.z_loss * weight
            self.dropped = self.dropped + report.dropped
            # adding 0 copies the first counts: a graph's replay may overwrite the report's memory
            self.counts[chunk, layer] = report.counts_E + self.counts.get((chunk, layer), 0)

    def sum_over(
        self, group: dist.ProcessGroup, numbers: Mapping[str, Tensor | float], like: Tensor
    ) -> None:
        """Sum this rank's `numbers` over all ranks; `like` is any fp32 tensor on the device."""

        def scalar(part: Tensor | float) -> Tensor:
            # new_full only launches a kernel; copying a host number would wait for the device
            return part.float() if isinstance(part, Tensor) else like.new_full((), part)

        self.names = tuple(numbers)
        self.over_ranks_N = torch.stack([scalar(part) for part in numbers.values()])
        all_reduce(self.over_ranks_N, group)

    def over_ranks(self, name: str) -> Tensor:
        """Return one of the numbers of all ranks, a scalar."""
        assert self.over_ranks_N is not None, "filled by the update"
        return self.over_ranks_N[self.names.index(name)]

    def append(self, name: str, value: Tensor) -> None:
        """Append a number that is equal on all ranks."""
        assert self.over_ranks_N is not None, "filled by the update"
        self.names = (*self.names, name)
        self.over_ranks_N = torch.cat((self.over_ranks_N, value[None]))

    def read(self) -> dict[str, float]:
        """Copy the numbers of all ranks to the host, which waits for the device."""
        assert self.over_ranks_N is not None, "filled by the update"
        return dict(zip(self.names, self.over_ranks_N.tolist(), strict=True))


@dataclass(slots=True, kw_only=True)
class StepReport:
    """Metrics of one step; None for those that do not apply or were not measured.

    The step fills in what the device has computed, then the trainer what it has timed, then the
    meter rates and, at the log interval, memory and loads. Loggers get it complete.
    """

    step: int = 0  # optimizer steps so far
    loss: float  # nats per token over the step
    aux_loss: float  # weighted balancing loss, sum over MoE layers
    z_loss: float  # weighted router z-loss, sum over MoE layers
    lr: float  # learning rate of this update
    weight_decay: float  # weight decay of this update
    grad_norm: float  # global norm before clipping
    skipped: int  # 1 when the update was skipped because the norm was not finite
    tokens: int = 0  # tokens trained on so far
    time: float = 0.0  # when this was reported, seconds since 1970
    step_ms: float = 0.0  # wall time of the step, ms; without validation and saving
    # part of step_ms in which the device waited for batches, ms; rank 0
    data_wait_ms: float = 0.0
    launch_ms: float | None = None  # part in which the host launched kernels, ms; rank 0
    device_wait_ms: float | None = None  # part in which the host waited for the GPU, ms; rank 0
    # data_wait_ms of the rank that waited longest, mean since the last line
    data_wait_max_ms: float | None = None
    # time per step since the last line in which the training thread could run and had no core,
    # ms; largest over ranks
    host_delay_ms: float | None = None
    host_cores: float | None = None  # cores of a host that the run's ranks kept busy, mean
    host_others: float | None = None  # cores that all other processes kept busy, busiest host
    gpu_clock: float | None = None  # clock of the slowest GPU over its highest
    gpu_others: int | None = None  # other processes on a GPU, most over ranks
    tokens_per_s: float = 0.0  # all ranks together
    tokens_per_s_per_gpu: float = 0.0  # per rank
    tflops_per_gpu: float = 0.0  # model TFLOP/s per rank (docs/planning.md)
    mfu: float | None = None  # tflops_per_gpu over the GPU's peak
    # joules of all GPUs per token since the last log interval; None unless every GPU counts them
    joules_per_token: float | None = None
    # largest over ranks; GPU tensors, or resident memory of the process on CPU
    memory_allocated_gib: float | None = None
    memory_reserved_gib: float | None = None  # largest over ranks; held by the GPU allocator
    memory_peak_gib: float | None = None  # largest over ranks; peak of memory_allocated_gib so far
    graph_count: int | None = None  # captured CUDA graphs, largest over ranks
    graph_capture_s: float | None = None  # seconds of capture, largest over ranks
    graph_objects_gib: float | None = None  # largest over ranks; driver memory of the graphs
    # largest over ranks; static buffers of inputs and gradients
    graph_static_gib: float | None = None
    graph_cut_gib: float | None = None  # largest over ranks; outputs of captured parts
    # largest over ranks; the rest of the graphs' memory pools
    graph_pool_gib: float | None = None
    # max/mean tokens per expert since the last line, mean over MoE layers
    moe_load_mean: float | None = None
    moe_load_worst: float | None = None  # the same, worst MoE layer
    # the same of expert-parallel ranks' tokens, mean over MoE layers, without clones
    moe_rank_load: float | None = None
    # share of (token, expert) choices since the last line dropped for lack of capacity
    moe_dropped: float | None = None
    # 1 if the step was rerun because experts lacked memory for dispatched tokens
    reruns: int | None = None
    # dispatched tokens of the busiest expert-parallel rank over the mean, without clones
    moe_rank_load_before: float | None = None
    moe_rank_load_after: float | None = None  # the same with clones, as computed
    # experts whose weights were sent to another rank, over all layers and microbatches
    moe_clones: int | None = None
    # share of the matrices in FP8 with entries beyond the largest number of their type, by
    # layers and steps since the last line
    fp8_overflow_inputs: float | None = None
    fp8_overflow_weights: float | None = None
    fp8_overflow_grads: float | None = None
    fp8_overflow_worst: float | None = None  # the largest entry over the FP8 maximum
    loss_scale: float | None = None  # factor on the loss in this step
    # time that saving the step before blocked this one, ms
    checkpoint_blocked_ms: float | None = None
    # metrics of several things of a kind, by label: loss, tokens and epochs of each source, for one
    parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def take(self, metrics: Mapping[str, object]) -> None:
        """Set metrics by key; those by label become parts."""
        for key, value in metrics.items():
            if isinstance(value, Mapping):
                self.parts = {**self.parts, key: value}
            else:
                setattr(self, key, value)

    def metrics(self) -> dict[str, float]:
        """Return the measured metrics by key."""
        found = {key: value for key, value in dataclasses.asdict(self).items() if value is not None}
        return _with_parts(found, found.pop("parts"))


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Mean loss over the held-out sequences after a step."""

    step: int
    val_loss: float  # nats per token
    val_tokens: int  # tokens it was measured on
    # loss of each source, where there are several; val_loss is their mean by weight
    by_source: Mapping[str, float] = field(default_factory=dict)
    time: float = field(default_factory=time.time)  # when this was reported, seconds since 1970

    def metrics(self) -> dict[str, float]:
        """Metric key -> value, for metrics.jsonl."""
        found = dataclasses.asdict(self)
        return _with_parts(found, {"val_loss": found.pop("by_source")})


def _with_parts(
    values: dict[str, float], parts: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return metrics with those of every part under its label: `val_loss/<label>`."""
    for key, found in parts.items():
        values |= {f"{key}/{label}": value for label, value in found.items()}
    return values


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """Return of all ranks to an earlier step in place, after some have died; seconds of rank 0."""

    step: int  # of the copies or of the checkpoint; training continues after it
    recovery_from: int  # last step that a rank had taken
    recovery_ranks: int  # ranks started again
    recovery_s: float  # the phases together
    # from the death until rank 0 noticed it, and until it had left its engine; None: it died itself
    recovery_notice_s: float | None = None
    recovery_abort_s: float | None = None
    recovery_rejoin_s: float | None = None  # until all ranks had met
    recovery_state_s: float | None = None  # until each had its state
    recovery_first_step_s: float | None = None
    recovery_capture_s: float | None = None  # in a later step; None without graphs
    time: float = field(default_factory=time.time)  # when this was reported, seconds since 1970

    def metrics(self) -> dict[str, float]:
        """Metric key -> value, for metrics.jsonl."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """Rollback to a checkpoint after a non-finite step."""

    step: int  # of the checkpoint; training continues after it
    rollback_from: int  # the bad step
    rollbacks: int  # so far in this process
    time: float = field(default_factory=time.time)  # when this was reported, seconds since 1970

    def metrics(self) -> dict[str, float]:
        """Metric key -> value, for metrics.jsonl."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """Say why, and what follows."""
        back = f"back to the checkpoint of step {self.step}"
        return f"loss or gradient norm not finite: {back}, with other data"


@dataclass(frozen=True, slots=True)
class CorruptionReport(RollbackReport):
    """Rollback after a difference between replays."""

    def __str__(self) -> str:
        """Say what follows; a note has said why."""
        return f"back to the checkpoint of step {self.step}, with the same data"
