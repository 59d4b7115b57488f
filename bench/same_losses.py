"""Whether two checkouts of Graphfold train the same numbers, as a refactoring has to.

    python bench/same_losses.py OLD [NEW] [--steps 50] [--out FILE]

NEW is this checkout where none is given. Both train every configuration below on the CPU, in turn
and in fresh processes, on the same copy of NEW's documentation. Losses and gradient norms of all
steps and the validation losses are compared as exact values. Prints a table, and exits with 1 where
a number differs or a run fails. Takes about six minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMON = ("train.seed=1", "train.seq_len=64", "train.micro_batch=4", "train.global_batch=16",
          "train.eval_interval=25", "train.eval_sequences=32", "train.sample_tokens=0",
          "log=none", "checkpoint=none", "data=text", "data.tokenizer=bytes")  # fmt: skip
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "moe": ("model=moe_tiny",),
    "dense, tp=2": ("model=dense_tiny", "parallel.tp=2"),
    "moe, dp=2 ep=2, capacity": (
        *("model=moe_tiny", "parallel.dp=2", "parallel.ep=2", "model.moe.dispatcher=all_to_all"),
        *("model.moe.capacity_factor=1.0", "model.moe.aux_loss_coeff=0.01"),
        *("model.moe.z_loss_coeff=0.001", "model.moe.shared_ffn_hidden_size=96"),
    ),
    "dense, pp=2 vpp=2, interleaved, selective": (
        *("model=dense_tiny", "parallel.pp=2", "parallel.vpp=2", "schedule=interleaved"),
        "recompute=selective",
    ),
    "moe, pp=2, multi-token prediction": (
        *("model=moe_tiny", "model.mtp.layers=2", "parallel.pp=2", "optim.overlap_params=true"),
    ),
    "moe, pp=2, zero_bubble_v, full_iteration": (
        *("model=moe_tiny", "model.tie_embeddings=true", "parallel.pp=2", "parallel.vpp=2"),
        *("schedule=zero_bubble_v", "cuda_graph=full_iteration"),
    ),
}
EVERY_STEP = ("loss", "grad_norm")
COMPARED = (*EVERY_STEP, "aux_loss", "z_loss", "val_loss", "mtp_loss/1", "mtp_loss/2")
Numbers = dict[tuple[int, str], float]  # step and key of metrics.jsonl -> value


def trained(checkout: Path, overrides: Sequence[str], folder: Path) -> Numbers:
    """What a run of a checkout has reported; ChildProcessError says how it failed."""
    env = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "train.py", *overrides, f"run_dir={folder}", f"data.cache_dir={folder}"],
        cwd=checkout,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing on stderr"]
        raise ChildProcessError(f"exit code {done.returncode}: {said[-1]}")
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["step"], key): row[key] for row in rows for key in COMPARED if key in row}


def first_difference(old: Numbers, new: Numbers, steps: int) -> str | None:
    """The first step that differs, and by how much; None where all steps are there and equal."""
    needed = [(step, key) for step in range(1, steps + 1) for key in EVERY_STEP]
    places = {*needed, (steps, "val_loss"), *old, *new}
    for step, key in sorted(places, key=lambda place: (place[0], COMPARED.index(place[1]))):
        before, after = old.get((step, key)), new.get((step, key))
        if before is None or after is None:
            where = " and ".join(["OLD"] * (before is None) + ["NEW"] * (after is None))
            return f"step {step}: no {key} in {where}"
        if before != after:
            return f"step {step}: {key} by {after - before:+.3g}, {before!r} to {after!r}"
    return None


def compared(trees: dict[str, Path], chosen: Sequence[str], steps: int, place: Path) -> str | None:
    """How NEW differs from OLD in one configuration; None where they are equal."""
    runs: dict[str, Numbers] = {}
    failed = []
    for tree, checkout in trees.items():
        overrides = (*COMMON, *chosen, f"train.steps={steps}", f"data.path={place.parent}/*.md")
        try:
            runs[tree] = trained(checkout, overrides, place / tree)
        except ChildProcessError as error:
            failed.append(f"{tree}: {error}")
    return "; ".join(failed) or first_difference(runs["OLD"], runs["NEW"], steps)


def differences(trees: dict[str, Path], steps: int) -> dict[str, str | None]:
    """Configuration -> how NEW differs from OLD; prints each as soon as it is known."""
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        for file in (trees["NEW"] / "README.md", *trees["NEW"].glob("docs/*.md")):
            shutil.copy(file, folder)
        print(f"{'configuration':<44}{'steps':>6}  numbers", flush=True)
        for number, (name, chosen) in enumerate(CONFIGURATIONS.items()):
            found[name] = compared(trees, chosen, steps, Path(folder) / str(number))
            print(f"{name:<44}{steps:>6}  {found[name] or 'equal'}", flush=True)
    return found


def commit(checkout: Path) -> str:
    """The commit of a checkout, with -dirty where tracked files differ from it."""
    line = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Train, compare, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("new", type=Path, metavar="NEW", nargs="?", default=ROOT)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trees = {"OLD": args.old.resolve(), "NEW": args.new.resolve()}
    commits = {tree: commit(checkout) for tree, checkout in trees.items()}
    print(*(f"{tree} {trees[tree]} {commits[tree]}" for tree in trees), sep="\n")
    found = differences(trees, args.steps)
    if args.out:
        facts = {"commits": commits, "steps": args.steps, "differences": found}
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
