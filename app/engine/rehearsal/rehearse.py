"""Run one rank of a plan for real, alone, and measure its memory and compute time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.choices import CpComm, GraphImpl, StaticTransport
from app.config import Run
from app.data.feed import Batch, make_batch
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups
from app.engine.rehearsal.clock import MADE_UP, Alive, Noting, TensorMeter, WorkClock
from app.engine.rehearsal.faked import FakedGroup, Message, faked_world
from app.engine.rehearsal.rows import receive_planned_rows
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.errors import ConfigError
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.static import PlannedStatic
from app.planner.plan import Plan

CAPTURED = "step with graphs"
DOCUMENTS = 4  # of a made-up sequence where documents are kept apart


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What one rank took."""

    rank: int
    pp_rank: int
    device: str  # cpu, or a GPU's name
    parameters: int  # bytes
    gradients: int  # bytes
    optimizer: int  # bytes
    held: int  # bytes of other tensors between steps
    saved: int  # most bytes between the actions of a step, beyond those between steps
    working: int  # most bytes within forwards and backwards beyond these
    peak: int  # bytes of tensors, at most within forwards and backwards
    peak_of_step: int  # bytes of tensors, at most within a step, its update included
    reserved: int | None  # bytes that torch's allocator held of the GPU; None on a CPU
    rows: int | None  # dispatched tokens of a microbatch, the most; None without any from others
    seconds: Mapping[str, float]  # of a step by kind of work, the mean; without messages
    messages: tuple[Message, ...]  # of the first step


def refuse_what_needs_others(run: Run, device: torch.device) -> None:
    """Raise ConfigError for a run of which one rank alone cannot be run or measured."""
    if run.cuda_graph.impl is not GraphImpl.none and device.type == "cpu":
        rule = "a CPU has no graphs, and what stands in for them keeps other memory"
        raise ConfigError("cuda_graph.impl", run.cuda_graph.impl, rule, nearest=GraphImpl.none)
    parts = run.parallel.cp > 1 and run.parallel.cp_comm_type is CpComm.all_gather
    if parts and device.type == "cpu":
        rule = "on a CPU torch makes masks for it whose memory cannot be measured"
        near = CpComm.all_to_all
        raise ConfigError("parallel.cp_comm_type", CpComm.all_gather, rule, nearest=near)
    planned = run_dispatcher(run)
    if planned is not None and planned.moe.echo.spares:
        spares = planned.moe.echo.spares
        rule = "clones follow the load of all ranks, and a rehearsal has one"
        raise ConfigError("model.moe.echo.spares", spares, rule, nearest=0)
    peers = isinstance(planned, PlannedStatic) and planned.peer
    if peers and device.type == "cuda" and run.world_size > 1:
        assert planned is not None
        rule = "ranks write into each other's GPU memory, and a rehearsal has one rank"
        key = "model.moe.static.transport"
        value = planned.moe.static.transport
        raise ConfigError(key, value, rule, nearest=StaticTransport.collective)


def rehearse(plan: Plan, rank: int, device: torch.device, steps: int) -> Rehearsed:
    """Build the engine of `rank` with faked groups, run two steps to warm up and to see its
    memory, and time `steps` more. Raises ConfigError as `build_engine`, and for what needs others.
    """
    run = plan.run
    refuse_what_needs_others(run, device)
    alive = None if device.type == "cuda" else Alive()
    clock, meter = WorkClock(device), TensorMeter(device, alive)
    watchdog = Noting(rank, run.schedule.timeout_s, clock=clock, meter=meter)
    messages: list[Message] = []
    with ExitStack() as world:
        world.enter_context(faked_world(rank, run.world_size))
        counting = ExitStack()
        if alive is not None:
            counting.enter_context(alive)
        with counting:
            torch.manual_seed(run.train.seed)
            engine = build_engine(plan, create_groups(plan.layout, rank), device, watchdog=watchdog)
            world.callback(engine.release)
            for group in engine.groups.named().values():
                assert isinstance(group, FakedGroup)
                group.standing_in = clock.made_up
                group.messages = messages
            rows, step = receive_planned_rows(engine), TrainingStep(engine)
            _take(step, engine)
            first = tuple(messages)
            for group in engine.groups.named().values():
                assert isinstance(group, FakedGroup)
                group.messages = None
            made_up = clock.seconds()[MADE_UP]
            meter.saved = meter.passes = 0  # the first step also sets up what stays
            for _ in range(1 + run.cuda_graph.warmup_steps * (engine.recorder is not None)):
                between = meter.live()
                meter.reset()
                _take(step, engine)
            whole = meter.peak()
        watchdog.meter = None
        clock.seconds()
        for _ in range(steps):
            _take(step, engine)
        captured = made_up if engine.recorder is not None else None
        seconds = _per_step(clock.seconds(), steps, captured)
        state = _state(engine)
    return Rehearsed(
        rank,
        engine.groups.pp_rank,
        device.type if device.type != "cuda" else torch.cuda.get_device_name(device),
        *state,
        held=between - sum(state),
        saved=meter.saved - between,
        working=meter.passes - meter.saved,
        peak=meter.passes,
        peak_of_step=max(whole, meter.passes),
        reserved=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
        rows=max(rows.arrived) if rows is not None and rows.arrived else None,
        seconds=seconds,
        messages=first,
    )


def _per_step(found: Counter[str], steps: int, made_up: float | None) -> dict[str, float]:
    """Return seconds of a step by kind of work. A graph hides its kinds and the copies that stand
    for messages: of those an eager step's seconds, `made_up`, are taken off; None without graphs.
    """
    seconds = {kind: whole / steps for kind, whole in found.items()}
    shown = seconds.pop(MADE_UP, 0.0)
    if made_up is None:
        return seconds
    return {CAPTURED: max(0.0, sum(seconds.values()) - max(0.0, made_up - shown))}


def _take(step: TrainingStep, engine: Engine) -> None:
    run = engine.plan.run
    step(batches_of(run), run.optim.lr, run.optim.weight_decay)


def batches_of(run: Run) -> list[Batch]:
    """Return microbatches of random tokens for one rank's step."""
    draw = np.random.default_rng(run.train.seed)
    size, length = run.train.micro_batch, run.train.seq_len
    most = run.data.most_documents(length)
    found = []
    for _ in range(run.num_microbatches):
        rows = draw.integers(1, run.model.vocab_size, (size, length + 1), dtype=np.int64)
        if most is not None:
            rows[:, :: max(1, length // min(most, DOCUMENTS))] = 0
        batch = make_batch([*rows], None if most is None else 0, most)
        found.append(batch)
    return found


def _state(engine: Engine) -> tuple[int, int, int]:
    """Return bytes of parameters, main gradients and optimizer state."""
    shards = [shard for each in engine.optimizer.shards for shard in each]
    params = [param for chunk in engine.chunks for param in chunk.parameters()]
    seen: set[int] = set()
    kinds: tuple[Iterable[Tensor], ...] = (
        params,
        (shard.buffer.grads for shard in shards),
        (tensor for shard in shards for tensor in (shard.main, *shard.moments.values())),
    )
    first, second, third = (_bytes(kind, seen) for kind in kinds)
    return first, second, third


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Return the bytes of storages that are not among those `seen`, and add them to these."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
