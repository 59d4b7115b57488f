"""What copies in memory, replays and marks cost a step (docs/reliability.md).

    python bench/reliability.py OUT.jsonl [--rounds 3] [--every 5,20] [overrides …]
    torchrun --nproc-per-node N bench/reliability.py OUT.jsonl …

Turn by turn in one process, on random tokens: blocks of steps without copies, and with a copy every
so many steps, from the shards and on a GPU from a copy of them there; with
train.deterministic=true checks by replays; then engines with and without marks in their graphs. A
block with copies has two, and its time has the wait for the first. Of one process copies are not
sent. Prints each part once it is there, and adds all as a line of JSON to OUT: milliseconds per
step of each block, and medians of ratios by round.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from throughput import QUIET, random_data, versions

from app.choices import GraphImpl
from app.cli.options.compose import load_overrides
from app.cli.options.messages import readable_errors
from app.cli.processes.launcher import Launch
from app.config import Run
from app.engine.build import build_engine
from app.engine.integrity.check import IntegrityCheck
from app.engine.ranks.groups import create_groups, process_world
from app.engine.recovery.copier import Copier
from app.engine.recovery.copies import Copies
from app.engine.report.metrics import Stopwatch
from app.engine.run.train import closing_graphs
from app.engine.run.trainer import Trainer
from app.engine.start.start import Start, choose_device
from app.engine.watchdog.watchdog import Watchdog
from app.planner.plan import Plan

PLAIN = 10  # steps of a block without copies
CHECKS = 4  # the first of which is not counted
TURNS = 2  # engines with marks, and without


class KeptHere(Copies):
    """Copies of the only rank, which has no partner."""

    def swap(self, group: dist.ProcessGroup) -> None:
        """Send nothing."""


def main() -> None:
    """Measure, and add the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", default="5,20", help="steps between copies")
    parser.add_argument("--parts", default="checks,copies,marks", help="what to measure")
    args, overrides = parser.parse_known_args()
    every = [int(each) for each in args.every.split(",")]
    launch = Launch.from_environment(os.environ)
    with readable_errors("reliability.py", launch.rank == 0):
        steps = 2 + args.rounds * (PLAIN + 4 * sum(every)) + 2 * PLAIN
        run = load_overrides([*QUIET, *overrides, f"train.steps={steps}"], launch.world_size or 1)
        parts = args.parts.split(",")
        found = measure(run, launch, rounds=args.rounds, every=every, parts=parts)
    if launch.rank == 0:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        line = {"overrides": overrides, "ranks": run.world_size, **found, **versions()}
        with args.out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def measure(
    run: Run, launch: Launch, *, rounds: int, every: Sequence[int], parts: Sequence[str]
) -> dict[str, Any]:
    """Measure these parts on this rank."""
    device = choose_device(run, launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
    with process_world(launch.rank, run.world_size, device):
        found: dict[str, Any] = {}
        with training(run, launch.rank, device) as trainer:
            if "checks" in parts and run.train.deterministic:
                found |= told(checks(trainer), launch.rank)
            if "copies" in parts:
                found |= told(copies(trainer, rounds, every), launch.rank)
        del trainer
        if "marks" in parts and run.cuda_graph.impl is not GraphImpl.none:
            found |= told(marks(run, launch.rank, device), launch.rank)
        return found


def told(part: dict[str, Any], rank: int) -> dict[str, Any]:
    """Print what was measured on rank 0, and return it."""
    for key, value in part.items() if rank == 0 else ():
        print(f"{key:>22}  {value}", flush=True)
    return part


@contextmanager
def training(run: Run, rank: int, device: torch.device) -> Iterator[Trainer]:
    """Yield a trainer that has captured what it captures."""
    plan = Plan(run)
    watchdog = Watchdog(rank, run.schedule.timeout_s)
    engine = build_engine(plan, create_groups(plan.layout, rank), device, watchdog=watchdog)
    with closing_graphs(engine), watchdog.running():
        trainer = Trainer(engine, random_data(run), Start(None))
        block(trainer, run.cuda_graph.warmup_steps + 2)
        yield trainer
        engine.gather_all_params()


def block(trainer: Trainer, steps: int, copier: Copier | None = None, every: int = 0) -> float:
    """Take steps, with copies behind the first and each `every`-th after it; ms per step."""
    watch, began = Stopwatch(), time.perf_counter()
    for n in range(steps):
        trainer.step(watch)
        if copier is not None and n % every == 0:
            copier.take(trainer.progress, trainer.feed.cursor.state())
    if trainer.engine.device.type == "cuda":
        torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - began) / steps
    if copier is not None:
        copier.wait()
    return took


def copies(trainer: Trainer, rounds: int, every: Sequence[int]) -> dict[str, Any]:
    """Measure blocks with and without copies."""
    groups = trainer.engine.groups
    size, cuda = groups.world.size(), trainer.engine.device.type == "cuda"
    kind = Copies if size > 1 else KeptHere
    copier = Copier(trainer.engine, kind(groups.rank, size, 1, pinned=cuda), {})
    host, whole = [], []
    for _ in range(3):  # the first two have new memory
        began = time.perf_counter()
        copier.take(trainer.progress, trainer.feed.cursor.state())
        if cuda:
            torch.cuda.synchronize()
        host.append(time.perf_counter() - began)
        copier.wait()
        whole.append(time.perf_counter() - began)
    rows: dict[str, list[float]] = {"plain_ms": []}
    for _ in range(rounds):
        rows["plain_ms"].append(block(trainer, PLAIN))
        for k, staged in itertools.product(every, (False, True) if cuda else (False,)):
            copier.staged = {} if staged else None
            name = f"every_{k}_staged_ms" if staged else f"every_{k}_ms"
            rows.setdefault(name, []).append(block(trainer, 2 * k, copier, k))
    ratios = {
        name.replace("_ms", ""): statistics.median(
            each / plain for each, plain in zip(times, rows["plain_ms"], strict=True)
        )
        for name, times in rows.items()
        if name != "plain_ms"
    }
    bytes_ = copier.copies.own[copier.copies.serial % 2].header["size"]
    return {
        "copied_gib": round(bytes_ / 2**30, 3),
        "copies_to_host_s": [round(each, 3) for each in host],
        "copies_alone_s": [round(each, 3) for each in whole],
        **{name: [round(each, 2) for each in times] for name, times in rows.items()},
        **{f"{name}_ratio": round(each, 4) for name, each in ratios.items()},
    }


def checks(trainer: Trainer) -> dict[str, Any]:
    """Measure checks by replays, which must find nothing."""
    check, took = IntegrityCheck(trainer.training_step, 1), []
    for _ in range(CHECKS):
        began = time.perf_counter()
        corruption = check.after(trainer.progress.step, trainer.batches, now=True)
        assert corruption is None, corruption
        took.append(1e3 * (time.perf_counter() - began))
    return {"microbatches_replayed": check.replay.count(),
            "check_ms": [round(each, 1) for each in took[1:]]}  # fmt: skip


def marks(run: Run, rank: int, device: torch.device) -> dict[str, Any]:
    """Measure steps of engines with marks in their graphs, and without."""
    rows: dict[str, list[float]] = {"unmarked_ms": [], "marked_ms": []}
    for _ in range(TURNS):
        for name, on in (("unmarked_ms", False), ("marked_ms", True)):
            graphs = dataclasses.replace(run.cuda_graph, marks=on)
            with training(dataclasses.replace(run, cuda_graph=graphs), rank, device) as trainer:
                rows[name].append(block(trainer, PLAIN))
            del trainer
            torch.cuda.empty_cache()
    ratio = statistics.median(rows["marked_ms"]) / statistics.median(rows["unmarked_ms"])
    return {**{name: [round(each, 2) for each in times] for name, times in rows.items()},
            "marked_ratio": round(ratio, 4)}  # fmt: skip


if __name__ == "__main__":
    main()
