"""Engine overhead: a training step of the default model against the same step in plain PyTorch,
turn by turn in one process.

    python bench/overhead.py [--rounds 30] [overrides …]

Prints the median step time of both, their ratio round by round (median and quartiles), and the
losses of both, which must agree at first. Writes bench/results/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from plain import PlainLoop, PlainModel

from app.cli.options.compose import load_overrides
from app.config import Run
from app.data.feed import Cursor, TrainFeed
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.report.metrics import Stopwatch
from app.engine.run.trainer import Trainer
from app.engine.start.start import Start, load_all_data
from app.model.layers.linear import named_parameters
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
WARMUP = 5  # rounds that are not counted


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="counted steps of each")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    args = parser.parse_args()
    run = load_overrides(args.overrides)
    result = measure(run, args.rounds)
    path = ROOT / "bench" / "results" / "overhead.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result.items():
        print(f"{key:>18}  {value}")


def measure(run: Run, rounds: int) -> dict[str, Any]:
    """Steps of both in turn on the same data: batches, forward, backward, update and report;
    seconds and losses.
    """
    cpu = torch.device("cpu")
    with process_world(0, 1, cpu):
        plan = Plan(run)
        groups = create_groups(plan.layout, 0)
        engine = build_engine(plan, groups, cpu)
        plain = PlainLoop(run, PlainModel(run, dict(named_parameters(engine.chunks[0]))))
        data = load_all_data(run, groups, 0)
        trainer, watch = Trainer(engine, data, Start(None)), Stopwatch()
        feed = TrainFeed(
            data.train,
            0,
            1,
            micro_batch=run.train.micro_batch,
            num_microbatches=run.num_microbatches,
            cursor=Cursor(),
        )
        times, losses = [], []
        for _ in range(WARMUP + rounds):
            t0 = time.perf_counter()
            report = trainer.step(watch)
            t1 = time.perf_counter()
            plain_loss = plain.step(feed.next_step(), report.lr)
            times.append((t1 - t0, time.perf_counter() - t1))
            losses.append((report.loss + report.aux_loss, plain_loss))
    return _summary(run, times[WARMUP:], losses)


def _summary(
    run: Run, times: list[tuple[float, float]], losses: list[tuple[float, float]]
) -> dict[str, Any]:
    ratios = sorted(engine / plain for engine, plain in times)
    quarter = len(ratios) // 4
    return {
        "model": run.model.name,
        "engine_ms": round(statistics.median(engine for engine, _ in times) * 1e3, 2),
        "plain_ms": round(statistics.median(plain for _, plain in times) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(ratios[quarter], 4), round(ratios[-quarter - 1], 4)],
        "rounds": len(times),
        # later, rounding flips a route
        "first_losses_gap": max(abs(engine - plain) for engine, plain in losses[:WARMUP]),
        "last_losses": [round(loss, 4) for loss in losses[-1]],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


if __name__ == "__main__":
    main()
