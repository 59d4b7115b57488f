"""Measure combinations one after the other on one rank: `python worker.py TASK.json`.

For each the engine is built, takes a few steps and is freed. What fails on one rank of several
leaves the others in a collective: that rank records the reason and ends, and so do all.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.processes.environment import joined_launch
from app.cli.processes.launcher import Launch
from app.cli.tuning.records import Measurement, State
from app.config import Run
from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.files.attempt import Attempt
from app.engine.ranks.groups import create_groups, process_world
from app.engine.run.host import check_host
from app.engine.run.train import closing_graphs
from app.engine.start.attention import choose_attention
from app.engine.start.start import Start, choose_device
from app.engine.step.engine import Engine
from app.engine.step.source_losses import SourceLosses
from app.engine.step.step import TrainingStep
from app.errors import ConfigError
from app.planner.plan import Plan

WARM = 2  # steps before those that are timed, beside those before a capture
REASON = 300  # longest reason kept, characters
FAILED = 1  # exit code
KINDS = 2  # different global batches


def main(arguments: Sequence[str], parent: int) -> int:
    """Measure the combinations of a task; return the exit code."""
    launch = joined_launch(parent)
    task = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    record = Path(task["record"])
    store = None
    if (launch.world_size or 1) > 1:
        attempt = Attempt(0, launch.master, store_stays=launch.agent_store)
        store = attempt.meeting_store(launch.rank, launch.world_size or 1)
    for number, candidate in enumerate(task["combinations"]):
        key = candidate["key"]
        own = None if store is None else dist.PrefixStore(f"combination/{number}", store)
        try:
            typed = Typed.parse([*task["words"], *candidate["overrides"]])
            plan = Plan(load_typed(typed, launch.world_size))
            found = measure(plan, launch, own, steps=task["steps"], key=key)
        except ConfigError as error:  # the same on every rank
            found = Measurement(key, State.refused, str(error)[:REASON])
        except torch.OutOfMemoryError as error:
            found = Measurement(key, State.no_memory, _first_line(error))
        except Exception as error:  # whatever fails is no reason to end the search
            found = Measurement(key, State.failed, f"{type(error).__name__}: {_first_line(error)}")
        alone = store is None or found.state in (State.measured, State.refused)
        if launch.rank == 0 or not alone:
            found.append(record)
        if not alone or _broken():
            sys.stdout.flush()
            os._exit(FAILED)  # no destructor may wait for other ranks
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def measure(
    plan: Plan, launch: Launch, store: dist.Store | None, *, steps: int, key: str
) -> Measurement:
    """Train a few steps on random tokens, and return their times and the memory of tensors.

    Raises ConfigError for what the host lacks, and whatever building or a step raises.
    """
    device = choose_device(plan.run, launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())  # as `app.engine.run.train.train` does
        torch.cuda.reset_peak_memory_stats()
    with process_world(launch.rank, launch.world_size or 1, device, store=store):
        groups = create_groups(plan.layout, launch.rank)
        check_host(plan.run, device)
        plan, _ = choose_attention(plan, groups, device, Start(None))
        torch.manual_seed(plan.run.train.seed * plan.run.world_size + launch.rank)
        engine = build_engine(plan, groups, device)
        with closing_graphs(engine), engine.watchdog.running():
            times = step_times(engine, steps)
            engine.gather_all_params()  # what is on its way holds memory
        peak = torch.zeros(())
        if device.type == "cuda":
            peak += torch.cuda.max_memory_allocated() / 2**30
        if groups.host.size() > 1:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=groups.host)
        groups.barrier()
    return Measurement(
        key,
        State.measured,
        step_ms=round(statistics.median(times), 3),
        steps_ms=tuple(round(each, 3) for each in times),
        peak_gib=round(float(peak), 3) if device.type == "cuda" else None,
    )


def step_times(engine: Engine, steps: int) -> list[float]:
    """Return milliseconds of so many steps, after those that warm up or capture graphs."""
    run, step, found = engine.plan.run, TrainingStep(engine), []
    warm = WARM + (run.cuda_graph.warmup_steps + 1 if engine.recorder is not None else 0)
    batches = [random_batches(engine, kind) for kind in range(KINDS)]
    for number in range(warm + steps):
        began = time.perf_counter()
        step(batches[number % KINDS], run.optim.lr, run.optim.weight_decay)
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1e3)
    return found[warm:]


def random_batches(engine: Engine, kind: int) -> list[Batch]:
    """Return this replica's microbatches of a global batch of random tokens."""
    run: Run = engine.plan.run
    size, length = run.train.micro_batch, run.train.seq_len
    positions_BS = torch.arange(length).expand(size, length)
    most = run.data.most_documents(length)
    # one document per sequence
    ends_BD = None if most is None else torch.full((size, most), length, dtype=torch.int32)
    told = engine.state(SourceLosses) is not None
    found = []
    for mb in range(run.num_microbatches):
        seed = 1000 * kind + mb * run.dp + engine.groups.dp_rank
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, run.model.vocab_size, (size, length + 1), generator=generator)
        sources_B = torch.zeros(size, dtype=torch.int64) if told else None
        tokens_BS, labels_BS = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        found.append(Batch(tokens_BS, labels_BS, positions_BS, ends_BD, sources_B))
    return found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:REASON]


def _broken() -> bool:
    """Return whether the GPU can no longer be used by this process, as after an illegal address."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.getppid()))
