"""Steady throughput: the trainer's own steps on random tokens, from a seed that every layout
shares.

    python bench/throughput.py NAME [--steps 20] [--skip 10] [--out bench/results] [overrides …]
    one process
    torchrun --nproc-per-node N bench/throughput.py NAME …
    several; rank 0 speaks

Prints medians over the steps after the first `skip`, with quartiles of the step time, and writes
OUT/NAME.json. A step is everything from one to the next: batches, forward, backward, update,
report. Load of the experts is that of the counted steps, peaks of memory are those of the whole
process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from app.cli.options.compose import load_overrides
from app.cli.options.messages import readable_errors
from app.cli.processes.launcher import Launch
from app.config import Run
from app.data.corpora import HeldOut
from app.data.feed import DataSplit
from app.data.packing import Documents, PackedSequences
from app.data.tokenizer import load_tokenizer
from app.engine.build import build_engine
from app.engine.ranks.groups import Groups, create_groups, process_world
from app.engine.report.metrics import GIB, Stopwatch
from app.engine.run.train import closing_graphs
from app.engine.run.trainer import Trainer
from app.engine.start.start import Data, Start, choose_device
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
QUIET = ("log=none", "checkpoint=none", "train.eval_interval=0", "train.eval_sequences=1")
MEDIANS = ("step_ms", "tokens_per_s", "tflops_per_gpu", "mfu")
LARGEST = ("memory_peak_gib", "moe_load_", "graph_")  # beginnings of keys


def main() -> None:
    """Run, summarise, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of the result file")
    parser.add_argument("--steps", type=int, default=20, help="all steps")
    parser.add_argument("--skip", type=int, default=10, help="first steps that are not counted")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results", help="folder of the result file"
    )
    args, overrides = parser.parse_known_args()
    if not 0 < args.skip <= args.steps - 2:
        parser.error("--skip leaves no two steps to count, or none to warm up")
    launch = Launch.from_environment(os.environ)
    with readable_errors("throughput.py", launch.rank == 0):
        lengths = f"train.steps={args.steps}", f"log.interval={args.skip}"
        run = load_overrides([*QUIET, *overrides, *lengths], launch.world_size or 1)
        rows, reserved = train(run, launch)
    if launch.rank == 0:
        result = {
            "name": args.name,
            "overrides": overrides,
            **summarise(rows, args.skip),
            **reserved,
            **versions(),
        }
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        for key, value in result.items():
            print(f"{key:>22}  {value}")


def train(run: Run, launch: Launch) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What every step reports, and the memory that the allocator has held at most, GiB, on the
    rank that held most.
    """
    device = choose_device(run, launch.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
    plan = Plan(run)
    with process_world(launch.rank, run.world_size, device):
        groups = create_groups(plan.layout, launch.rank)
        engine = build_engine(plan, groups, device)
        with closing_graphs(engine), engine.watchdog.running():
            trainer, watch = Trainer(engine, random_data(run), Start(None)), Stopwatch()
            rows = [trainer.step(watch).metrics() for _ in range(run.steps)]
            engine.gather_all_params()
        return rows, reserved_gib(groups, device)


def random_data(run: Run) -> Data:
    """As many uniform token ids as the steps use, the same on every rank; also for validation,
    which does not happen. Documents that are kept apart have lengths like those of web pages.
    """
    train = run.train
    tokenizer = load_tokenizer("bytes")
    count = train.steps * train.global_batch * train.seq_len + 1
    generator = np.random.default_rng(train.seed)
    ids = generator.integers(0, run.model.vocab_size, count)
    most = run.data.most_documents(train.seq_len)
    if most is None:
        documents, boundary = Documents.from_lists([ids]), None
    else:
        boundary = tokenizer.eod
        ids[ids == boundary] = 0
        ends = np.cumsum(web_lengths(generator, count))
        ends = ends[: int(np.searchsorted(ends, count))]
        ids[ends - 1] = boundary
        documents = Documents.from_lists(np.split(ids, ends))
    packed = PackedSequences(
        documents.lengths_D, documents.read, train.seq_len, seed=train.seed, max_documents=most
    )
    if most is not None:
        mean = train.seq_len * packed.per_epoch / len(documents)
        print(f"documents of {mean:.0f} tokens on average, {packed.padding:.2%} padding")
    split = DataSplit(packed, boundary, most)
    return Data(tokenizer, split, (HeldOut("", 1.0, split),))


def web_lengths(generator: np.random.Generator, tokens: int) -> np.ndarray:
    """Lengths of documents that have more than so many tokens together: half of them below 400,
    800 on average.
    """
    draws = generator.lognormal(np.log(400), 1.18, tokens // 100 + 100)
    lengths: np.ndarray = np.maximum(draws, 2).astype(np.int64)
    return lengths


def reserved_gib(groups: Groups, device: torch.device) -> dict[str, float]:
    """Nothing on a CPU."""
    if device.type != "cuda":
        return {}
    most = torch.tensor(torch.cuda.max_memory_reserved(device) / GIB, device=device)
    if groups.world.size() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX, groups.world)
    return {"memory_reserved_peak_gib": most.item()}


def summarise(rows: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """Medians over the steps after the first `skip`; a key that no step has is left out."""
    steady = rows[skip:]
    medians = {
        key: round(statistics.median(row[key] for row in steady), 4)
        for key in MEDIANS
        if key in steady[0]
    }
    quartiles = [
        round(value, 2)
        for value in statistics.quantiles((row["step_ms"] for row in steady), n=4)[::2]
    ]
    largest = {
        key: max(row[key] for row in steady if key in row)
        for key in steady[-1]
        if key.startswith(LARGEST)
    }
    return {
        **medians,
        "step_ms_quartiles": quartiles,
        **largest,
        "steps": len(steady),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def versions() -> dict[str, str]:
    """What it ran on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {
        "device": gpu,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


if __name__ == "__main__":
    main()
