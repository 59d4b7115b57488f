"""Train on one rank from a plan: process groups, engine, data, trainer, watchdog."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from app.choices import OnCorruption
from app.config import Run
from app.data.corpora import Corpora
from app.engine.build import build_engine
from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import FolderLock
from app.engine.files.signals import exit_code
from app.engine.ranks.agreement import all_succeed, rank_zero_says
from app.engine.ranks.groups import Groups, create_groups, process_world
from app.engine.ranks.lost import lost_connection
from app.engine.report.lasting import lasting_output
from app.engine.run.host import check_host
from app.engine.run.ready import StartTimes
from app.engine.run.trainer import Trainer
from app.engine.start.attention import choose_attention
from app.engine.start.start import (
    Data,
    Start,
    choose_device,
    claim_start,
    load_all_data,
    look_once,
    open_pretrained,
    reads_initial_weights,
    with_steps,
)
from app.engine.step.engine import Engine
from app.engine.watchdog.heartbeats import Heartbeats
from app.engine.watchdog.watchdog import Watchdog
from app.errors import LEAVES, Corrupted, Diverged, say, warn
from app.hf.adapter import SavedAdapter
from app.planner.plan import Plan

FAILED = 1  # exit code of a rank that ends because another one has; its launcher names that one


@dataclass(frozen=True, slots=True)
class Beginning:
    """Beginning of a run: where it starts from, and what trains it."""

    def choose(
        self,
        run: Run,
        groups: Groups,
        lock: FolderLock,
        *,
        attempt: Attempt,
        sources: Callable[[], Corpora],
    ) -> Start:
        """Choose folder and checkpoint; all ranks call it. Raises ConfigError, the same on all."""
        earlier = attempt.earlier
        return rank_zero_says(groups, lambda: claim_start(run, earlier(run), lock, sources=sources))

    def trainer(self, engine: Engine, data: Data, start: Start, times: StartTimes) -> Trainer:
        """Build the trainer of this rank."""
        return Trainer(engine, data, start, times=times)


def train(plan: Plan, rank: int, local_rank: int, attempt: Attempt) -> int:
    """Train on this rank from start to end, and return the exit code.

    The code is 0, that of the signal that ended the run early, DIVERGED after non-finite numbers,
    CORRUPTED, or FAILED when another rank has ended. Raises ConfigError for what only the host,
    data, a checkpoint or a full disk reveals.
    """
    run = plan.run
    times = StartTimes(attempt.began)
    device = on_device(run, local_rank)
    times.end("device")
    store = attempt.meeting_store(rank, run.world_size)
    with FolderLock() as lock, lasting_output():
        try:
            return train_together(
                plan,
                rank,
                local_rank,
                attempt=attempt,
                device=device,
                store=store,
                lock=lock,
                times=times,
                beginning=Beginning(),
            )
        except RuntimeError as error:
            line = None if run.log.verbose else lost_connection(error, rank)
            if line is None:
                raise
            say(line, sys.stderr)
            return FAILED


def on_device(run: Run, local_rank: int) -> torch.device:
    """Return the device of a local rank, and make it the current one. Raises ConfigError."""
    device = choose_device(run, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # CUDA graphs captured later need gradients that never were on the default stream
        torch.cuda.set_stream(torch.cuda.Stream())
    return device


def train_together(
    plan: Plan,
    rank: int,
    local_rank: int,
    *,
    attempt: Attempt,
    device: torch.device,
    store: dist.Store,
    lock: FolderLock,
    times: StartTimes,
    beginning: Beginning,
) -> int:
    """Connect the ranks that meet in `store`, train, and return the exit code. Raises as `train`
    does.
    """
    run = plan.run
    watchdog = watch_over(run, rank, store)
    # Closed in reverse order: the watchdog stops before the process groups are destroyed.
    watched = watchdog.running(attempt.end_process)
    with ExitStack() as world, watched:
        watchdog.meet("connecting the ranks")
        world.enter_context(process_world(rank, run.world_size, device, store=store))
        trainer = start_up(
            plan,
            local_rank,
            device,
            attempt=attempt,
            lock=lock,
            watchdog=watchdog,
            times=times,
            beginning=beginning,
        )
        with closing_graphs(trainer.engine):
            try:
                finished = trainer.fit(attempt, lock)
            except Diverged as end:
                if rank == 0:
                    attempt.tell(str(end))
                return _code_of(end, trainer.engine, rank - local_rank)
    if not finished:
        trainer.request.hand_on()  # to submitit's handler, which requeues the job
    return 0 if finished else exit_code(trainer.request.signal)


def _code_of(end: Diverged, engine: Engine, node: int) -> int:
    """Return the exit code of this rank, of a node that its first rank names.

    With train.on_corruption=leave ranks of the other nodes fail, and are thus started again.
    """
    nodes = [node] * engine.groups.host.size()
    if len(nodes) > 1:
        dist.all_gather_object(nodes, node, engine.groups.host)  # also waits for all
    leaves = engine.plan.run.train.on_corruption is OnCorruption.leave
    faulty = {nodes[rank] for rank in end.ranks} if isinstance(end, Corrupted) and leaves else set()
    if not faulty or faulty == set(nodes):
        return end.code
    return LEAVES if node in faulty else 1


def watch_over(run: Run, rank: int, store: dist.Store) -> Watchdog:
    """Build the watchdog of this rank; it exchanges heartbeats with others through `store`."""
    others = Heartbeats.over(store, rank, run.world_size) if run.world_size > 1 else None
    return Watchdog(rank, run.schedule.timeout_s, others)


def start_up(
    plan: Plan,
    local_rank: int,
    device: torch.device,
    attempt: Attempt,
    lock: FolderLock,
    watchdog: Watchdog,
    times: StartTimes,
    beginning: Beginning | None = None,
) -> Trainer:
    """Do everything before the first step; `times` records how long each part takes.

    Needs the default process group. Raises ConfigError, the same on every rank.
    """
    run = plan.run
    rank = watchdog.rank
    watchdog.meet("creating the process groups")
    groups = create_groups(plan.layout, rank)
    watchdog.follow(groups.named())
    all_succeed(groups, lambda: check_host(run, device))
    times.end("ranks")
    watchdog.rest("choosing the checkpoint to start from")
    beginning = beginning or Beginning()
    sources = look_once(run)
    start = beginning.choose(run, groups, lock, attempt=attempt, sources=sources)
    times.end("choice of a checkpoint")
    pretrained = None
    if run.model.init_from is not None and reads_initial_weights(start):
        watchdog.rest("reading the pretrained model")
        pretrained = open_pretrained(run, groups, local_rank)
        times.end("pretrained model")
    adapter = None
    if run.lora.init_from is not None and start.manifest is None:
        adapter = all_succeed(groups, lambda: SavedAdapter(run.model, run.lora))
        if rank == 0 and (left_out := adapter.left_out()):
            warn(f"lora.init_from={run.lora.init_from}: {left_out}")
    watchdog.rest("preparing the corpus")
    data = load_all_data(run, groups, local_rank, sources=sources, manifest=start.manifest)
    plan = Plan(with_steps(run, data.train, start)) if run.train.epochs else plan
    times.end("data")
    plan, start = choose_attention(plan, groups, device, start)
    watchdog.rest("building the model")
    # differs by rank, as the jitter of router inputs must
    torch.manual_seed((run.train.seed * run.world_size + rank) % 2**64)
    engine = build_engine(
        plan, groups, device, watchdog=watchdog, pretrained=pretrained, adapter=adapter
    )
    times.end("model")
    return beginning.trainer(engine, data, start, times)


@contextmanager
def closing_graphs(engine: Engine) -> Iterator[None]:
    """Release CUDA graphs after the block, also on error: they must go before communicators."""
    try:
        yield
    finally:
        engine.release()
