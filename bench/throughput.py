"""Steady throughput of a training run: starts train.py as a user would and reads its metrics.

    python bench/throughput.py NAME [--skip 10] [--out bench/results] [overrides …]

Prints medians over the steps after the first `skip`, with quartiles of the step time, and writes OUT/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
QUIET = ("log=none", "checkpoint=none", "train.sample_tokens=0", "train.eval_interval=0", "train.eval_sequences=1")


def main() -> None:
    """Run, summarise, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the result file")
    parser.add_argument("--skip", type=int, default=10, help="first steps that are not counted")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the result file")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, ROOT / "train.py", *QUIET, *overrides, f"run_dir={folder}/run"], check=True)
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    result = {
        "name": args.name,
        "overrides": overrides,
        **summarise([row for row in rows if "loss" in row], args.skip),
        **versions(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result.items():
        print(f"{key:>22}  {value}")


def summarise(rows: list[dict[str, Any]], skip: int) -> dict[str, Any]:
    """Medians over the steps after the first `skip`."""
    steady = rows[skip:]
    keys = ("step_ms", "tokens_per_s", "tflops_per_gpu", "mfu")
    medians = {key: round(statistics.median(row[key] for row in steady), 4) for key in keys if key in steady[0]}
    quartiles = [round(value, 2) for value in statistics.quantiles((row["step_ms"] for row in steady), n=4)[::2]]
    found = {key: max(row[key] for row in rows if key in row) for key in ("memory_peak_gib", "moe_load_mean") if key in rows[-1]}
    return {
        **medians,
        "step_ms_quartiles": quartiles,
        **found,
        "steps": len(steady),
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def versions() -> dict[str, str]:
    """What it ran on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": gpu, "torch": torch.__version__, "cuda": str(torch.version.cuda), "python": sys.version.split()[0]}


if __name__ == "__main__":
    main()
