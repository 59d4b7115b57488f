"""How long training stands still for a checkpoint: written beside training, and in between; and how
long loading one takes.

    python bench/checkpoint.py [--saves 5] [overrides …]

One process, on the GPU where there is one. Prints medians and writes bench/results/checkpoint.json.
A save begins when the one before is complete, so that what is measured is the copy and not the wait
for it; the first one also takes the memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from app.cli.options.compose import load_overrides
from app.config import Run
from app.engine.build import build_engine
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.checkpoint.saver import Saver
from app.engine.files.checkpoints import complete_checkpoints, read_manifest
from app.engine.ranks.groups import create_groups, process_world
from app.planner.plan import Plan

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--saves", type=int, default=5, help="counted saves of each kind")
    parser.add_argument("overrides", nargs="*", help="as for train.py")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with process_world(0, 1, device):
        result = measure(load_overrides(args.overrides), args.saves, device)
    path = ROOT / "bench" / "results" / "checkpoint.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result.items():
        print(f"{key:>24}  {value}")


def measure(run: Run, saves: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of each kind, on one machine and one file system."""
    plan = Plan(run)
    groups = create_groups(plan.layout, 0)
    engine = build_engine(plan, groups, device)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    }
    found["parameters"] = sum(piece.main.numel() for piece in engine.optimizer.param_shards())
    with tempfile.TemporaryDirectory() as folder:
        for name, asynchronous in (("beside", True), ("between", False)):
            config = dataclasses.replace(run.checkpoint, asynchronous=asynchronous)
            saver = Saver(
                dataclasses.replace(engine, plan=Plan(dataclasses.replace(run, checkpoint=config))),
                lambda: None,
            )
            blocked, whole = zip(
                *(_save(saver, Path(folder), step) for step in range(1, saves + 2)), strict=True
            )
            found |= {f"{name}_first_ms": blocked[0], f"{name}_ms": statistics.median(blocked[1:])}
            found[f"{name}_complete_ms"] = statistics.median(whole[1:])
        path = complete_checkpoints(Path(folder))[-1]
        since = time.perf_counter()
        load_checkpoint(path, read_manifest(path), engine)
        found["load_ms"] = (time.perf_counter() - since) * 1e3
    return {
        key: round(value, 1) if isinstance(value, float) else value for key, value in found.items()
    }


def _save(saver: Saver, folder: Path, step: int) -> tuple[float, float]:
    """(ms that training would wait, ms until all is on disk)."""
    since = time.perf_counter()
    saver.save(folder, Progress(step, step, step), {})
    blocked = saver.blocked()
    assert blocked is not None
    saver.wait()
    return blocked * 1e3, (time.perf_counter() - since) * 1e3


if __name__ == "__main__":
    main()
