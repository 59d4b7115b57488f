"""Parameters of a model, and floating-point operations per token and per rank (docs/planning.md).

They are sums over the operations of `app.plan.parts`. A GEMM of [m, k] and [k, n] has 2·m·n·k, so
that each weight of a matrix costs 2 per token in forward, and twice that in backward. Norms,
activations, rotary positions and the embedding lookup are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from app.config import LoraConfig, ModelConfig, MoEConfig, Run, TrainConfig
from app.config.profile import HOST_GB_S
from app.plan.cost.rates import GIGA
from app.plan.layout import ParallelLayout
from app.plan.model.stage import model_weights
from app.plan.model.vocabulary import table
from app.plan.model.weight import Weight
from app.plan.parts.dispatcher import busiest_load
from app.plan.parts.stage import fold_stages, sizes_of
from app.plan.parts.trace import Operation, offloaded
from app.plan.stages import Stage

# Dense bf16 tensor-core peaks without sparsity, TFLOP/s per GPU, from the vendors' data sheets:
# words that the device name must contain, and the peak. The first match counts, so variants come
# before the plain name.
PEAKS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in (
        ("GB300", 2500.0),
        ("B300", 2250.0),
        ("GB200", 2500.0),
        ("B200", 2250.0),
        ("B100", 1750.0),
        ("H100 PCIE", 756.0),
        ("H100 NVL", 835.0),
        ("H200 NVL", 835.0),
        ("GH200", 989.0),
        ("H200", 989.0),
        ("H100", 989.0),
        ("H800", 989.0),
        ("H20", 148.0),
        ("A100", 312.0),
        ("A800", 312.0),
        ("A40", 150.0),
        ("A30", 165.0),
        ("A10G", 70.0),
        ("A10", 125.0),
        ("L40S", 362.0),
        ("L40", 181.0),
        ("L4", 121.0),
    )
)
PLANNED_PEAK = 989.0  # TFLOP/s that plans assume where hardware.peak_tflops is null: an H100's


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, in elements."""

    total: int  # all of them
    active: int  # parameters that one token uses: all but unchosen experts
    embedding: int  # token embedding; also the head if tied
    head: int  # the head's own matrix; 0 if tied
    experts: int  # routed experts of all layers, which expert parallelism divides


def parameter_count(model: ModelConfig) -> ParameterCount:
    """Count the parameters of a model."""
    weights = [each.weight for each in model_weights(model)]
    rows = table(model).numel
    return ParameterCount(
        sum(weight.numel for weight in weights),
        sum(_used(weight, model.moe) for weight in weights),
        rows,
        head=0 if model.tie_embeddings else rows,
        experts=sum(weight.numel for weight in weights if weight.expert),
    )


def _used(weight: Weight, moe: MoEConfig | None) -> int:
    """Return the elements that one token uses."""
    if moe is None or not weight.expert:
        return weight.numel
    return weight.numel // moe.num_experts * moe.top_k


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return FLOPs of forward and backward per token, for sequences of seq_len tokens.

    Recomputation is not counted: this is the numerator of model FLOPs utilisation.
    """
    return _flops_per_token(model, seq_len)


def run_flops_per_token(run: Run) -> float:
    """Return `flops_per_token` of a run, without gradients that frozen parameters save."""
    return _flops_per_token(run.model, run.train.seq_len, frozen=run.train.frozen, lora=run.lora)


def _flops_per_token(
    model: ModelConfig,
    seq_len: int,
    frozen: tuple[str, ...] = (),
    lora: LoraConfig = LoraConfig(),  # noqa: B008 - frozen
) -> float:
    train = TrainConfig(seq_len=seq_len, micro_batch=1, frozen=frozen)
    run = Run(model, train=train, lora=lora)
    whole = Stage(tuple(model.all_layers), embedding=True, head=True)
    (flops,) = stage_flops(run, [whole], ParallelLayout(1))
    return float((flops.forward + flops.backward) // seq_len)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a GPU in TFLOP/s by the name its driver reports.

    None if unknown. Power and clock limits make a card's real peak lower; a measured ceiling is
    more accurate.
    """
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    return next((peak for needed, peak in PEAKS if needed <= words), None)


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of a part, a stage or a model on one rank for one microbatch."""

    forward: int
    # gradients of activations; all of attention's backward, which has no weights
    backward_input: int
    backward_weight: int  # gradients of weights
    recompute: int  # forwards that backward reruns

    @property
    def backward(self) -> int:
        """Both parts, without recomputation."""
        return self.backward_input + self.backward_weight


def stage_flops(
    run: Run, stages: Sequence[Stage], layout: ParallelLayout, load: float = 1.0
) -> list[Flops]:
    """Return FLOPs of one rank of each stage for one microbatch.

    A rank does 1 / (tp·cp) of the work of its microbatch's tokens: by width, or by tokens if
    weights are replicated. `load`: rows of this rank's experts over the mean of its expert-parallel
    group (`busiest_load` is that of the slowest rank). With recompute.partial_microbatches, the
    microbatch is not a spared one.
    """
    s = sizes_of(run, layout, load=load)
    rows = fold_stages(s, stages, _part_flops)
    return [_total(row) for row in rows]


def _part_flops(ops: Sequence[Operation], timed: bool = False) -> Flops:
    """Sum up the FLOPs of a part; `timed` divides FP8 GEMMs by their speedup."""
    forward = inputs = weight = recompute = 0
    for op in (op for op in ops if op.flops):
        again = op.flops if op.rerun else op.flops_recomputed
        own, of_weight = op.fp8.speedups if timed and op.fp8 else (1.0, 1.0)
        once = op.flops if own == 1 else round(op.flops / own)
        forward += once
        if not op.reached:
            continue
        inputs += once if op.weight else 2 * once
        if op.weight and op.trained:
            weight += op.flops if of_weight == 1 else round(op.flops / of_weight)
        recompute += again if own == 1 else round(again / own)
    return Flops(forward, inputs, weight, recompute=recompute)


def _total(parts: Sequence[tuple[Flops, int]]) -> Flops:
    return Flops(
        sum(times * part.forward for part, times in parts),
        sum(times * part.backward_input for part, times in parts),
        sum(times * part.backward_weight for part, times in parts),
        recompute=sum(times * part.recompute for part, times in parts),
    )


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Estimated compute time of one microbatch in one stage, seconds."""

    forward: float
    backward_input: float  # recomputation included
    backward_weight: float

    @property
    def total(self) -> float:
        """Seconds of forward and backward, recomputation included."""
        return self.forward + self.backward_input + self.backward_weight


def stage_seconds(
    run: Run, stages: Sequence[Stage], layout: ParallelLayout
) -> tuple[StageSeconds, ...]:
    """Return times of each stage's busiest rank: FLOPs / (peak_tflops · efficiency).

    FP8 GEMMs count divided by their speedup.
    """
    s = sizes_of(run, layout, load=busiest_load(run))
    rows = fold_stages(s, stages, partial(_part_flops, timed=True))
    rate = (run.hardware.peak_tflops or PLANNED_PEAK) * 1e12 * run.hardware.efficiency
    found = tuple(
        StageSeconds(
            flops.forward / rate,
            (flops.backward_input + flops.recompute) / rate,
            flops.backward_weight / rate,
        )
        for flops in map(_total, rows)
    )
    if not s.recompute.usual.offload:
        return found
    away = fold_stages(s, stages, lambda ops: sum(offloaded(ops, s.recompute.usual).values()))
    copies = (sum(size * times for size, times in row) / (HOST_GB_S * GIGA) for row in away)
    return tuple(map(_with_copies, found, copies))


def _with_copies(stage: StageSeconds, copies: float) -> StageSeconds:
    """Return the times with what compute does not hide of copies to the host, and of those back."""
    forward = max(stage.forward, copies)
    return replace(
        stage,
        forward=forward,
        backward_input=max(stage.backward_input, copies - stage.backward_weight),
    )
