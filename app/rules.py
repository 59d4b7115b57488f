"""Rules that span sections of the configuration: small named functions in one tuple, applied before anything is built."""

from __future__ import annotations

from collections.abc import Callable

from app.choices import Decay, DispatcherKind, Dtype
from app.config import Run
from app.errors import ConfigError, nearest_divisors, nearest_multiples


def check_world(run: Run) -> None:
    """Every rank belongs to one data-parallel replica."""
    if run.parallel.world_size and run.dp != run.parallel.world_size:
        raise ConfigError(
            "parallel.dp", run.dp, f"{run.parallel.world_size} processes run: dp must equal them", run.parallel.world_size
        )


def check_expert_parallel(run: Run) -> None:
    """The experts divide over ep ranks, and ep divides the world."""
    ep, moe = run.parallel.ep, run.model.moe
    if ep > 1 and moe is None:
        raise ConfigError("parallel.ep", ep, f"model={run.model.name} has no experts", 1)
    if moe and moe.num_experts % ep:
        raise ConfigError(
            "parallel.ep", ep, f"must divide model.moe.num_experts={moe.num_experts}", nearest_divisors(ep, moe.num_experts)
        )
    if run.world_size % ep:
        near = f"{nearest_divisors(ep, run.world_size)}, or parallel.dp={ep * -(-run.world_size // ep)}"
        raise ConfigError("parallel.ep", ep, f"must divide the world size {run.world_size}", near)
    if moe and ep > 1 and moe.dispatcher is DispatcherKind.local:
        raise ConfigError(
            "model.moe.dispatcher", moe.dispatcher, f"parallel.ep={ep} needs an exchange between ranks", "auto or all_to_all"
        )


def check_expert_widths(run: Run) -> None:
    """Grouped products need rows of whole 16-byte units."""
    if run.model.moe is None:
        return
    unit = 4 if run.precision.params is Dtype.float32 else 8
    for key, width in (
        ("model.hidden_size", run.model.hidden_size),
        ("model.moe.ffn_hidden_size", run.model.moe.ffn_hidden_size),
    ):
        if width % unit:
            raise ConfigError(
                key, width, f"experts in {run.precision.params.value} need a multiple of {unit}", nearest_multiples(width, unit)
            )


def check_batch(run: Run) -> None:
    """The global batch is a whole number of microbatches on every data-parallel rank."""
    per_step = run.train.micro_batch * run.dp
    if run.train.global_batch % per_step:
        raise ConfigError(
            "train.global_batch",
            run.train.global_batch,
            f"must be a multiple of micro_batch × dp = {run.train.micro_batch} × {run.dp} = {per_step}",
            nearest_multiples(run.train.global_batch, per_step),
        )


def check_lr_schedule(run: Run) -> None:
    """Warm-up and the last decay fit into the decay steps."""
    steps, warmup = run.decay_steps, run.optim.warmup_steps or 0
    if warmup >= steps:
        raise ConfigError("optim.warmup_steps", warmup, f"must be below the {steps} decay steps", steps // 10)
    last = run.optim.wsd_decay_steps or 0
    if run.optim.decay is Decay.wsd and warmup + last > steps:
        rule = f"with optim.warmup_steps={warmup} longer than the {steps} decay steps"
        raise ConfigError("optim.wsd_decay_steps", last, rule, steps - warmup)


RULES: tuple[Callable[[Run], None], ...] = (
    check_world,
    check_expert_parallel,
    check_expert_widths,
    check_batch,
    check_lr_schedule,
)


def check(run: Run) -> Run:
    """Apply every cross-section rule; returns the run unchanged or raises ConfigError."""
    for rule in RULES:
        rule(run)
    return run
