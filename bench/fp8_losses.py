"""What products in FP8 do to the loss of real text: runs by each recipe beside bf16 runs,
from the same seeds.

    python bench/fp8_losses.py OUT [--steps 500] [--seeds 3] [--first-seed 0]
        [--experiment smallmoe] [--ways current,block] [--together 1] [--in-bf16] [override …]

Trains `+experiment=small`, or another, on the standard library's text, into OUT, `together` runs
on each GPU at a time, so that one starts while another computes; what has ended there is not run
again, so that the same line goes on. Writes OUT/fp8_losses.json and OUT/fp8_losses.svg: validation
losses, and how far the mean of each recipe's last ones is from that of the bf16 ones of the same
seeds, in percent. `margin` is `delayed` with a margin of 1. With smallmoe, instead of recipes:
`current` for linear layers and head, `experts` for routed experts too, and `experts_delayed` with
linear layers and head by `delayed`, which is the fastest. Overrides are for all runs, and so is a
warm-up of a fifth of the steps: with the twentieth that is the default, three runs of bf16 ended
7 % apart. Runs on single bytes differ by more than recipes do; on pieces of words, which
bench/corpus.py makes of a folder of text, they differ far less.

Runs validate as they train, in FP8. With `--in-bf16` the weights at the end are validated in
bf16 as well: a run is saved, and taken up again for one step that changes nothing, its learning
rate being 1e-12. One that had ended without that is trained anew.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from statistics import mean, stdev
from typing import Any

import torch
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PLAIN = "bf16"
CURRENT, DELAYED, MARGIN, BLOCK, EXPERTS = "current", "delayed", "margin", "block", "experts"
FASTEST = "experts_delayed"
COLOURS = {
    CURRENT: "#0072B2",
    DELAYED: "#D55E00",
    MARGIN: "#E69F00",
    BLOCK: "#009E73",
    EXPERTS: "#CC79A7",
    FASTEST: "#56B4E9",
}
WAYS = {  # by experiment
    "small": (CURRENT, DELAYED, MARGIN, BLOCK),
    "smallmoe": (CURRENT, EXPERTS, FASTEST),
}
RECIPES = {EXPERTS: CURRENT, FASTEST: DELAYED, MARGIN: DELAYED}
Curve = list[tuple[int, float]]  # step, validation loss
BOUND = 0.5  # percent off bf16 within which a recipe can be taken for it


def runs(
    experiment: str, seeds: Iterable[int], ways: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and overrides of each."""
    for seed in seeds:
        same = f"+experiment={experiment}", f"train.seed={seed}"
        yield f"{PLAIN}-{seed}", same
        for way in ways:
            yield f"{way}-{seed}", (*same, *fp8(way))


def fp8(way: str) -> Iterator[str]:
    """Overrides of a way."""
    yield f"precision.fp8.recipe={RECIPES.get(way, way)}"
    yield f"precision.fp8.include=[linear,head{',experts' if way in (EXPERTS, FASTEST) else ''}]"
    if way == MARGIN:
        yield "precision.fp8.margin=1"


def of_way(found: dict[str, Curve], way: str) -> list[Curve]:
    """Those of all its seeds."""
    return [losses for name, losses in found.items() if name.startswith(f"{way}-")]


def means(last: dict[str, float], plain: dict[str, float]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each way the mean of its last losses, percent off those of `plain` from the same seeds,
    of all and of each, and of two seeds or more the standard error of that.
    """
    last = plain | last
    for way in (PLAIN, *COLOURS):
        seeds = [name.removeprefix(f"{way}-") for name in last if name.startswith(f"{way}-")]
        seeds = [seed for seed in seeds if f"{PLAIN}-{seed}" in last]
        if not seeds:
            continue
        own = [last[f"{way}-{seed}"] for seed in seeds]
        other = [last[f"{PLAIN}-{seed}"] for seed in seeds]
        row: dict[str, Any] = {"seeds": len(seeds), "val_loss": round(mean(own), 4)}
        row["off_percent"] = round(100 * (mean(own) / mean(other) - 1), 3)
        if way != PLAIN:
            offs = [100 * (one / two - 1) for one, two in zip(own, other, strict=True)]
            if len(offs) > 1:
                row["standard_error"] = round(stdev(offs) / math.sqrt(len(offs)), 3)
            row["of_each_seed"] = [round(each, 3) for each in offs]
        yield way, row


def curve(folder: Path) -> Curve:
    """Validation losses of a run, that in bf16 behind them."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]


def ended(folder: Path, steps: int) -> bool:
    """Whether a run has been validated after its last step."""
    there = (folder / "metrics.jsonl").exists()
    return there and steps in dict(curve(folder))


def train(
    folder: Path, steps: int, overrides: Sequence[str], gpus: Queue[str], in_bf16: bool
) -> str | None:
    """One run on the next free GPU, unless it has ended; what went wrong, if anything did."""
    again = in_bf16 and any(map(in_fp8, overrides))
    if ended(folder, steps + again):
        return None
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut off
    kept = f"checkpoint.interval={steps}" if again else "checkpoint=none"
    length = f"train.steps={steps}", f"train.eval_interval={max(1, steps // 10)}"
    lines = [(*length, f"optim.warmup_steps={steps // 5}", kept, *overrides)]
    if again:
        still = "optim.lr=1e-12", "optim.min_lr=1e-13", "optim.warmup_steps=0"
        own = [override for override in overrides if not in_fp8(override)]
        lines.append((f"train.steps={steps + 1}", "resume=auto", *own, *still))
    gpu = gpus.get()
    try:
        return next(filter(None, (start(folder, line, gpu) for line in lines)), None)
    finally:
        gpus.put(gpu)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def in_fp8(override: str) -> bool:
    """Whether it is about products in FP8."""
    return override.startswith("precision.fp8.")


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; without any, one that is no GPU."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [*map(str, range(torch.cuda.device_count()))] or [""]


def start(folder: Path, overrides: Sequence[str], gpu: str) -> str | None:
    """Run train.py into a folder; what went wrong, if anything did."""
    line = (
        *(sys.executable, "train.py", "cuda_graph=full_iteration", "parallel.dp=1"),
        *("train.sample_tokens=0", "log=none", f"run_dir={folder}"),
        f"data.cache_dir={folder.parent / 'cache'}",
        *overrides,
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["?"])[-1]


def picture(found: dict[str, Curve]) -> Figure:
    """How far losses are from the mean of the bf16 runs at each step, in percent: their band, a
    thin line for each run in FP8, the mean of each way. Models that are untrained, or have
    had the first tenth of the steps, are left out.
    """
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    plain = [[loss for _, loss in losses] for losses in of_way(found, PLAIN)]
    middle = [mean(at) for at in zip(*plain, strict=True)]
    steps = [step for step, _ in of_way(found, PLAIN)[0]]

    def off(losses: Sequence[float]) -> list[float]:
        return [100 * (one / other - 1) for one, other in zip(losses, middle, strict=True)]

    band = [*zip(*map(off, plain), strict=True)]
    low, high = [*map(min, band)], [*map(max, band)]
    shown = slice(2, None)
    axes.fill_between(
        steps[shown], low[shown], high[shown], color="#CCCCCC", label=f"{PLAIN}, all runs"
    )
    for way, colour in COLOURS.items():
        lines = [off([loss for _, loss in losses]) for losses in of_way(found, way)]
        for line in lines:
            axes.plot(steps[shown], line[shown], color=colour, linewidth=0.6, alpha=0.4)
        if lines:
            means = [mean(at) for at in zip(*lines, strict=True)]
            axes.plot(
                steps[shown], means[shown], color=colour, linewidth=2, label=f"{way}, mean of runs"
            )
    for bound in (-BOUND, BOUND):
        axes.axhline(bound, color="0.4", linewidth=0.8, linestyle="dashed")
    axes.axhline(0, color="0.4", linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel(f"validation loss off the mean of {PLAIN} runs, %")
    figure.legend(loc="outside upper center", frameon=False, ncols=6)
    return figure


def main() -> int:
    """Train what has not been trained, print how far recipes are off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--experiment", choices=WAYS, default="small")
    parser.add_argument("--ways", help="some of the experiment's, by commas")
    parser.add_argument("--together", type=int, default=1, help="runs on a GPU at a time")
    parser.add_argument("--in-bf16", action="store_true", help="validate the weights in bf16 too")
    given, overrides = parser.parse_known_args()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    gpus: Queue[str] = Queue()
    for gpu in visible_gpus() * given.together:
        gpus.put(gpu)
    ways = given.ways.split(",") if given.ways else WAYS[given.experiment]
    if not {*ways} <= {*WAYS[given.experiment]}:
        parser.error(f"--ways: of {given.experiment} there are {', '.join(WAYS[given.experiment])}")
    end = given.first_seed + given.seeds
    named = dict(runs(given.experiment, range(given.first_seed, end), ways))
    known = dict(runs(given.experiment, range(end), WAYS[given.experiment]))
    with ThreadPoolExecutor(gpus.qsize()) as pool:
        errors = pool.map(
            lambda name: train(
                out / name,
                given.steps,
                (*named[name], *overrides),
                gpus,
                in_bf16=given.in_bf16,
            ),
            named,
        )
        failed = {name: error for name, error in zip(named, errors, strict=True) if error}
    for name, error in failed.items():
        print(f"{name}: {error}", file=sys.stderr)
    every = {name: curve(out / name) for name in known if ended(out / name, given.steps)}
    rows = summary(every, given.steps)
    if rows is None:
        return 1
    for validated, found in rows["means"].items():
        for way, row in found.items():
            off = f"{row['off_percent']:+.2f} %"
            if "standard_error" in row:
                off += f", standard error {row['standard_error']:.2f}"
            print(f"{way}, {validated}: {row['val_loss']:.4f} of {row['seeds']} seeds, {off}")
    (out / "fp8_losses.json").write_text(json.dumps(rows, indent=1) + "\n")
    picture(rows["runs"]).savefig(out / "fp8_losses.svg")
    return 1 if failed else 0


def summary(every: dict[str, Curve], steps: int) -> dict[str, Any] | None:
    """Runs as they have been trained, their means as trained and, where that was asked for, in
    bf16; None without a run of bf16 to compare with.
    """
    runs = {
        name: [point for point in all_of if point[0] <= steps] for name, all_of in every.items()
    }
    if not of_way(runs, PLAIN):
        return None
    last = {name: losses[-1][1] for name, losses in runs.items()}
    plain = {name: loss for name, loss in last.items() if name.startswith(f"{PLAIN}-")}
    found = {"as trained": dict(means(last, plain))}
    in_bf16 = {name: losses[-1][1] for name, losses in every.items() if losses[-1][0] > steps}
    if in_bf16:
        found["in bf16"] = dict(means(in_bf16, plain))
    return {"means": found, "runs": runs, "in bf16": in_bf16}


if __name__ == "__main__":
    sys.exit(main())
