"""Rules on batches, learning-rate schedules, rollbacks and copies in memory."""

from __future__ import annotations

from app.choices import BadStep, Decay, Device, GraphImpl, OnCorruption
from app.config import Run
from app.config.training import PROFILED
from app.errors import ConfigError, FirstOf, Instead, nearest_divisors, nearest_multiples
from app.plan.partners import shift_of
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.static import PlannedStatic


def check_batch(run: Run) -> None:
    """Refuse a global batch that does not divide into microbatches on every data-parallel rank."""
    per_step = run.train.micro_batch * run.dp
    if run.train.global_batch % per_step:
        raise ConfigError(
            "train.global_batch",
            run.train.global_batch,
            f"must be a multiple of micro_batch × dp = {run.train.micro_batch} × {run.dp} = "
            f"{per_step}",
            nearest=(*nearest_multiples(run.train.global_batch, per_step), *_batch_of(run)),
        )


def _batch_of(run: Run) -> tuple[FirstOf, ...]:
    """Return smaller microbatches, or fewer replicas, that divide the global batch."""
    found: tuple[FirstOf, ...] = ()
    per_rank, rest = divmod(run.train.global_batch, run.dp)
    if not rest:
        found = nearest_divisors(run.train.micro_batch, per_rank, "train.micro_batch")[:1]
    whole, rest = divmod(run.train.global_batch, run.train.micro_batch)
    if rest or not run.parallel.dp:
        return found
    return (*found, *nearest_divisors(run.dp, whole, "parallel.dp")[:1])


def check_epochs(run: Run) -> None:
    """Refuse epochs of data without a known length."""
    for key, value in (("streaming", run.data.streaming), ("sources", bool(run.data.parts))):
        if run.train.epochs is not None and value:
            rule = f"are those of one source of known length, and data.{key} is given"
            near = Instead("train.epochs=null", "train.tokens=1e9")
            raise ConfigError("train.epochs", run.train.epochs, rule, nearest=near)


def check_profile(run: Run) -> None:
    """Refuse to profile steps that are not taken, or that capture graphs."""
    first, steps = run.train.profile, run.train.steps
    if first is None:
        return
    captures = run.cuda_graph.impl is not GraphImpl.none
    earliest = run.cuda_graph.warmup_steps + 2 if captures else 1
    latest = None if steps is None else steps - PROFILED + 1
    if latest is not None and latest < earliest:
        rule = f"profiles {PROFILED} steps, and train.steps={steps} leaves fewer"
        raise ConfigError("train.profile", first, rule, nearest="null")
    if first < earliest:
        rule = f"must be at least {earliest}, after the step that captures graphs"
        raise ConfigError("train.profile", first, rule, nearest=earliest)
    if latest is not None and first > latest:
        rule = f"must be at most {latest}: of train.steps={steps}, {PROFILED} are profiled"
        raise ConfigError("train.profile", first, rule, nearest=latest)


def check_lr_schedule(run: Run) -> None:
    """Refuse warm-up and final decay that do not fit into the decay steps."""
    if run.train.steps is None:
        return  # until the data are read
    warmup, last, whole = run.warmup_steps, run.wsd_decay_steps, run.decay_steps
    if warmup >= whole:
        rule = f"must be below the {whole} decay steps"
        raise ConfigError("optim.warmup_steps", warmup, rule, nearest=whole // 10)
    if run.optim.decay is Decay.wsd and warmup + last > whole:
        rule = f"with {warmup} steps of warm-up longer than the {whole} decay steps"
        advice = None if whole > warmup else "make the decay longer"
        near = whole - warmup or None
        raise ConfigError("optim.wsd_decay_steps", last, rule, nearest=near, advice=advice)


def check_memory_copies(run: Run) -> None:
    """Refuse copies in memory that no other rank, or no other node, could hold."""
    every, world, per_node = run.checkpoint.memory_every, run.world_size, run.parallel.gpus_per_node
    if every is None:
        return
    if world == 1:
        rule = "keeps the copy of a rank on another one, and this run has one rank"
        near = Instead("checkpoint.memory_every=null")
        raise ConfigError("checkpoint.memory_every", every, rule, nearest=near)
    if shift_of(world, per_node) is None:
        rule = f"keeps copies on another node, and of {world} ranks on nodes of {per_node} "
        rule += f"(parallel.gpus_per_node) the last {world - per_node} cannot hold those of the "
        rule += f"first {per_node}"
        near = Instead("checkpoint.memory_every=null")
        raise ConfigError("checkpoint.memory_every", every, rule, nearest=near)
    dispatcher = run_dispatcher(run)
    by_peer = isinstance(dispatcher, PlannedStatic) and dispatcher.peer
    if by_peer and run.train.device is not Device.cpu:
        rule = "wakes ranks that wait for a dead one, and kernels that wait on peer memory stay"
        near = Instead("model.moe.static.transport=collective", "checkpoint.memory_every=null")
        raise ConfigError("checkpoint.memory_every", every, rule, nearest=near)


def check_replays(run: Run) -> None:
    """Refuse replays whose bits may differ without a fault."""
    if run.train.replay_every is not None and not run.train.deterministic:
        rule = "compares bits, and with train.deterministic=false equal work has other ones"
        near = (Instead("train.deterministic=true"), "null")
        raise ConfigError("train.replay_every", run.train.replay_every, rule, nearest=near)


def check_rollback(run: Run) -> None:
    """Refuse rollback without checkpoints."""
    if run.train.on_corruption is not OnCorruption.stop and not run.checkpoint.interval:
        rule = "goes back to checkpoints, and checkpoint.interval=0 saves none"
        near = ("stop", Instead("checkpoint=default"))
        raise ConfigError("train.on_corruption", run.train.on_corruption, rule, nearest=near)
    if run.train.on_bad_step is BadStep.rollback and not run.checkpoint.interval:
        rule = "goes back to checkpoints, and checkpoint.interval=0 saves none"
        raise ConfigError(
            "train.on_bad_step",
            run.train.on_bad_step,
            rule,
            nearest=("skip", Instead("checkpoint=default")),
        )
