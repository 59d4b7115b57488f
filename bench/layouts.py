"""Layouts on several GPUs: the same losses as one, their speed and memory, and how much of what
moves runs beside compute.

    python bench/layouts.py --save one.json [overrides …] [/ overrides …]
    one GPU torchrun --nproc-per-node 2 bench/layouts.py --against one.json parallel.tp=2 [/
    overrides …]

`/` separates runs, one after the other in the same processes; --save and --against name the losses
by their place in the row, or with --first always compare with the first. Each trains on the same
few batches of random tokens again and again, so that losses fall and all see the same. --delay S
holds rank 0 up for a random time of at most S seconds before every tenth exchange of a pipeline, as
a slow neighbour would. Rank 0 prints one line of JSON per run.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from throughput import web_lengths
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from app.cli.options.compose import load_overrides
from app.cli.processes.launcher import Launch
from app.config import Run
from app.data.feed import Batch, make_batch
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep
from app.planner.plan import Plan

KINDS = 4  # different batches
SLOW = 10  # exchanges between two delays


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--delay", type=float, default=0.0, help="longest delay of rank 0, seconds")
    parser.add_argument("--save", type=Path, help="write the losses there")
    parser.add_argument("--against", type=Path, help="losses to compare with")
    parser.add_argument("--first", action="store_true", help="compare all with the first saved run")
    args, overrides = parser.parse_known_args()
    launch = Launch.from_environment(os.environ)
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream())
    runs = [list(group) for slash, group in itertools.groupby(overrides, "/".__eq__) if not slash]
    before, saved = json.loads(args.against.read_text()) if args.against else [], []
    with process_world(launch.rank, launch.world_size or 1, device):
        for number, chosen in enumerate(runs):
            result = train(chosen, launch, device, steps=args.steps, delay=args.delay)
            saved.append(result["losses"])
            if before:
                result["loss_differences"] = differences(
                    result["losses"], before[0 if args.first else number]
                )
            if launch.rank == 0:
                result["losses"] = [result["losses"][0], result["losses"][-1]]
                print(
                    json.dumps(
                        {
                            "overrides": chosen,
                            "delay": args.delay,
                            "torch": torch.__version__,
                            **result,
                        }
                    ),
                    flush=True,
                )
    if args.save and launch.rank == 0:
        args.save.write_text(json.dumps(saved))


def differences(losses: list[float], before: list[float]) -> dict[str, float]:
    """Largest differences from another run."""
    apart = [abs(a - b) for a, b in zip(losses, before, strict=False)]
    return {"first": apart[0], "of three": max(apart[:3]), "of all": max(apart)}


def train(
    overrides: list[str], launch: Launch, device: torch.device, steps: int, delay: float
) -> dict[str, Any]:
    """One run, from nothing to nothing."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plan = Plan(load_overrides(overrides, launch.world_size))
    groups = create_groups(plan.layout, launch.rank)
    engine = build_engine(plan, groups, device)
    with engine.watchdog.running():
        result = measure(engine, steps, delay if launch.rank == 0 else 0.0)
    for chunk in range(len(engine.chunks)):
        engine.optimizer.gather_params(chunk)  # what is on its way holds memory
    del engine
    gc.collect()
    return result


def measure(engine: Engine, steps: int, delay: float) -> dict[str, Any]:
    """Losses, step times once settled, memory of this rank, and overlap of one traced step."""
    run, step = engine.plan.run, TrainingStep(engine)
    if delay:
        hold_up(engine, delay)
    losses, times = [], []
    for n in range(steps):
        began = time.perf_counter()
        facts, _ = step(
            batches_of(run, n % KINDS, engine.groups.dp_rank), run.optim.lr, run.optim.weight_decay
        )
        times.append(time.perf_counter() - began)
        losses.append(facts.loss)
    peak = torch.cuda.max_memory_allocated()
    for _ in range(2):  # the first trace starts slowly
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            step(batches_of(run, 0, engine.groups.dp_rank), run.optim.lr, run.optim.weight_decay)
            torch.cuda.synchronize()
    settled = times[min(5, steps // 2) :]
    planned = engine.plan.memory[engine.groups.pp_rank].allocated
    return {
        "losses": losses,
        "step_ms": round(statistics.median(settled) * 1e3, 2),
        "step_ms_quartiles": [
            round(value * 1e3, 2) for value in statistics.quantiles(settled, n=4)[::2]
        ],
        "tokens_per_s": round(
            run.train.global_batch * run.train.seq_len / statistics.median(settled)
        ),
        "peak_gib": round(peak / 2**30, 3),
        "planned_gib": round(planned / 2**30, 3),
        **overlap(profiler),
    }


def hold_up(engine: Engine, delay: float) -> None:
    """Make every SLOW-th exchange of this rank late."""
    post, draw, count = engine.transport.post, random.Random(1), iter(range(10**9))

    def late(tensors: Any) -> None:
        if next(count) % SLOW == 0:
            time.sleep(draw.uniform(0, delay))
        post(tensors)

    type(engine.transport).post = lambda self, tensors: late(tensors)


def overlap(profiler: profile) -> dict[str, float]:
    """Time of NCCL's kernels on this rank in a step, and the share of it in which other kernels
    run.
    """
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = {
        kind: sorted(
            (e.time_range.start, e.time_range.end) for e in events if ("nccl" in e.name) == kind
        )
        for kind in (True, False)
    }
    busy = merged(spans[False])
    total = sum(end - start for start, end in spans[True])
    beside = sum(
        max(0, min(end, stop) - max(start, begin))
        for start, end in spans[True]
        for begin, stop in busy
    )
    return {
        "nccl_ms": round(total / 1e3, 2),
        "beside_compute": round(beside / total, 3) if total else 0.0,
    }


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping spans as one."""
    result: list[tuple[float, float]] = []
    for start, end in spans:
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((start, end))
    return result


def batches_of(run: Run, kind: int, dp_rank: int) -> list[Batch]:
    """This replica's microbatches of one step. Over all replicas the sequences are the same for
    every layout and every number of sequences in a microbatch.
    """
    size, length = run.train.micro_batch, run.train.seq_len
    most = run.data.most_documents(length)
    positions = torch.arange(length).expand(size, length)
    found = []
    for mb in range(run.num_microbatches):
        first = 1000 * kind + (mb * run.dp + dp_rank) * size
        rows = torch.stack([random_row(run, seed) for seed in range(first, first + size)])
        if most is not None:
            found.append(of_documents(rows.numpy(), most, mb))
            continue
        found.append(
            Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), positions, ends_BD=None)
        )
    return found


def random_row(run: Run, seed: int) -> Tensor:
    """Return the tokens of a sequence and the one behind it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, run.model.vocab_size, (run.train.seq_len + 1,), generator=generator)


def of_documents(rows: np.ndarray, most: int, seed: int) -> Batch:
    """Sequences of documents as long as web pages; token 0 ends one."""
    rows = np.maximum(rows, 1)
    for row in rows:
        ends = np.cumsum(web_lengths(np.random.default_rng(seed), len(row)))
        row[ends[ends < len(row)][: most - 1]] = 0
    return make_batch([*rows], 0, most)


if __name__ == "__main__":
    main()
