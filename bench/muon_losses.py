"""Losses of AdamW and Muon on real text, one run per GPU at a time.

    CUDA_VISIBLE_DEVICES=0,1,2,3 python bench/muon_losses.py OUT [--steps 1000] [override …]

Trains 8 layers of smallmoe with three seeds, and small with one, on the standard library's text,
into OUT. What has ended there is not run again, so that the same line resumes. Writes
OUT/losses.jsonl, a line per run with losses and seconds by step, and OUT/losses.png. Overrides are
for all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
COLOURS = {"adamw": "#0072B2", "muon": "#D55E00"}
SMOOTHED = 20  # steps of a mean in the picture


def runs() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield name, model and overrides of each run."""
    for optim in COLOURS:  # the longest first
        yield f"small-{optim}-1", "small", ("+experiment=small", "train.seed=1", f"optim={optim}")
    for optim in COLOURS:
        for seed in (1, 2, 3):
            words = ("+experiment=smallmoe", "model.num_layers=8", f"train.seed={seed}")
            yield f"smallmoe-{optim}-{seed}", "smallmoe", (*words, f"optim={optim}")


def main() -> None:
    """Train what has not ended, then write lines and picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    given, overrides = parser.parse_known_args()
    given.out = given.out.resolve()
    given.out.mkdir(parents=True, exist_ok=True)
    gpus: Queue[str] = Queue()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    for device in devices:
        gpus.put(device)
    listed = list(runs())
    with ThreadPoolExecutor(len(devices)) as pool:
        jobs = [
            pool.submit(train, given.out / name, (*words, *overrides), given.steps, gpus=gpus)
            for name, _, words in listed
        ]
        for job in jobs:
            job.result()
    rows = [{"run": name, "model": model, **curve(given.out / name)} for name, model, _ in listed]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (given.out / "losses.jsonl").write_text(lines, encoding="utf-8")
    picture(rows).savefig(given.out / "losses.png", dpi=150)
    for row in rows:
        last = row["loss"][-SMOOTHED:]
        end = f"{row['seconds'][-1]:7.0f} s  val {row['val_loss']}"
        print(f"{row['run']:20} {sum(last) / len(last):.4f}  {end}")


def train(folder: Path, words: Sequence[str], steps: int, gpus: Queue[str]) -> None:
    """Train a run on the next free GPU; no-op if it has ended."""
    if (folder / "metrics.jsonl").exists() and len(curve(folder)["loss"]) >= steps:
        return
    device = gpus.get()
    fixed = (
        f"train.steps={steps}", f"run_dir={folder}", "log=none", "log.interval=1",
        "train.sample_tokens=0", "checkpoint.interval=0",
    )  # fmt: skip
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    with (folder.parent / f"{folder.name}.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "train.py", *fixed, *words]
        try:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
        finally:
            gpus.put(device)


def curve(folder: Path) -> dict[str, Any]:
    """Return losses and seconds of training by step, and the last validation loss."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if row.get("loss") is not None]
    seconds, elapsed = [], 0.0
    for row in steps:
        elapsed += row["step_ms"] / 1e3
        seconds.append(round(elapsed, 3))
    held_out = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    return {
        "loss": [row["loss"] for row in steps],
        "seconds": seconds,
        "val_loss": held_out[-1] if held_out else None,
    }


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """Draw smoothed losses by step and by time, a line of plots per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(11, 4.2 * len(models)), layout="constrained")
    for line, axes in zip(models, figure.subplots(len(models), 2, squeeze=False), strict=True):
        for row in (row for row in rows if row["model"] == line):
            optim = row["run"].split("-")[1]
            losses = [
                sum(part) / len(part)
                for end in range(1, len(row["loss"]) + 1)
                for part in [row["loss"][max(0, end - SMOOTHED) : end]]
            ]
            steps = range(1, len(losses) + 1)
            for axis, places in zip(axes, (steps, row["seconds"]), strict=True):
                axis.plot(places, losses, color=COLOURS[optim], label=row["run"], linewidth=1)
        for axis, name in zip(axes, ("step", "seconds of training"), strict=True):
            axis.set(xlabel=name, ylabel="loss, nats per token", title=line)
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
