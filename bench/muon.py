"""Muon on one GPU: Newton–Schulz steps next to plain GEMMs of their shapes, and the share of the
update in a step of +experiment=smallmoe.

    python bench/muon.py [--json FILE] [--sequences 8,64] [--steps 6] [override …]

Per shape: TFLOP/s of `orthogonalise`, of batched GEMMs of its three kinds one after the other, and
their ratio. Per number of sequences and optimizer: milliseconds of a step and of its update, by
events on the GPU, medians without the first two steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timing import gpu_time
from torch import Tensor

from app.cli.options.compose import load_overrides
from app.config import Run
from app.data.feed import Batch
from app.engine.build import build_engine
from app.engine.ranks.groups import create_groups, process_world
from app.engine.step.step import TrainingStep
from app.optim.distributed import DistributedOptimizer
from app.optim.muon import orthogonalise
from app.plan.sharding.optimizers import NEWTON_SCHULZ_STEPS
from app.planner.plan import Plan

# matrices, rows, columns: experts, shared experts and attention of smallmoe; feed-forward of an 8 B
# model
SHAPES = ((128, 512, 1024), (48, 1024, 1024), (16, 256, 1024), (2, 4096, 14336))
FIRST = 2  # steps that are not counted


def main() -> None:
    """Print a line for each, and save them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--sequences", default="8,64", help="of a step")
    parser.add_argument("--steps", type=int, default=6)
    given, overrides = parser.parse_known_args()
    rows = [newton_schulz(*shape) for shape in SHAPES]
    for sequences in map(int, given.sequences.split(",")):
        for optim in ("adamw", "muon"):
            rows.append(share(sequences, optim, given.steps, overrides=overrides))
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def newton_schulz(count: int, rows: int, columns: int) -> dict[str, Any]:
    """Speed of the steps on a batch, and of GEMMs of the same shapes."""
    x = torch.randn(count, rows, columns, device="cuda", dtype=torch.bfloat16)
    gram, out = x @ x.mT, torch.empty_like(x)
    square = torch.empty_like(gram)

    def gemms() -> None:
        for _ in range(NEWTON_SCHULZ_STEPS):
            torch.bmm(x, x.mT, out=square)
            torch.bmm(gram, gram, out=square)
            torch.bmm(gram, x, out=out)

    flops = count * NEWTON_SCHULZ_STEPS * (4 * rows**2 * columns + 2 * rows**3)
    (ours, spread), (plain, _) = gpu_time(lambda: orthogonalise(x)), gpu_time(gemms)
    row = {
        "shape": [count, rows, columns],
        "ms": ours,
        "spread_ms": spread,
        "tflops": flops / ours / 1e9,
        "gemm_tflops": flops / plain / 1e9,
        "ratio": plain / ours,
    }
    print(json.dumps(row), flush=True)
    return row


def share(sequences: int, optim: str, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Times of steps and of their updates."""
    run = load_overrides(
        ["+experiment=smallmoe", f"optim={optim}", f"train.global_batch={sequences}", *overrides], 1
    )
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    with process_world(0, 1, device), torch.cuda.stream(torch.cuda.Stream(device)):
        times = measured(run, device, steps)
    row = {"optim": optim, "sequences": sequences, **times}
    row["share"] = row["update_ms"] / row["step_ms"]
    print(json.dumps(row), flush=True)
    gc.collect()  # of the engine, whose parts refer to each other
    torch.cuda.empty_cache()
    return row


def measured(run: Run, device: torch.device, steps: int) -> dict[str, float]:
    """Medians over steps, ms."""
    plan = Plan(run)
    engine = build_engine(plan, create_groups(plan.layout, 0), device)
    step, found = TrainingStep(engine), []
    inside: list[torch.cuda.Event] = []
    update = DistributedOptimizer.step

    def timed(optimizer: DistributedOptimizer, *given: Any) -> Tensor:
        inside.append(event())
        skipped = update(optimizer, *given)
        inside.append(event())
        return skipped

    DistributedOptimizer.step = timed  # type: ignore[method-assign]
    try:
        for _ in range(FIRST + steps):
            inside.clear()
            start = event()
            step(batches(run), run.optim.lr, run.optim.weight_decay)
            end = event()
            end.synchronize()
            found.append((start.elapsed_time(end), inside[0].elapsed_time(inside[1])))
    finally:
        DistributedOptimizer.step = update  # type: ignore[method-assign]
    whole, updates = zip(*found[FIRST:], strict=True)
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    times = {"step_ms": statistics.median(whole), "update_ms": statistics.median(updates)}
    return {**times, "peak_gib": peak}


def event() -> torch.cuda.Event:
    """Record an event now."""
    found = torch.cuda.Event(enable_timing=True)
    found.record()
    return found


def batches(run: Run) -> list[Batch]:
    """Random tokens of a step."""
    shape = run.train.micro_batch, run.train.seq_len
    places = torch.arange(run.train.seq_len).expand(shape)
    found = []
    for _ in range(run.num_microbatches):
        rows = torch.randint(0, run.model.vocab_size, (shape[0], shape[1] + 1))
        tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        found.append(Batch(tokens, labels, places, ends_BD=None))
    return found


if __name__ == "__main__":
    main()
