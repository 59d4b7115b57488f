"""train.py as a program, for tests on GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
GPUS = torch.cuda.device_count()
SMALL = (
    "train.micro_batch=2",
    "train.global_batch=8",
    "train.seq_len=256",
    "train.eval_interval=0",
    "log=none",
    "train.sample_tokens=0",
    "checkpoint=none",
    "data=text",
    "data.path=app/**/*.py",
)

GRAPHS = {
    **{name: (f"cuda_graph={name}",) for name in ("partial", "layer", "full_iteration")},
    "update": ("cuda_graph=full_iteration", "cuda_graph.optimizer=true"),
}


def command(folder: Path, *overrides: str) -> list[str]:
    """The line that trains into a folder."""
    return [
        sys.executable,
        str(ROOT / "train.py"),
        *SMALL,
        f"run_dir={folder}",
        f"data.cache_dir={folder.parent}/cache",
        *overrides,
    ]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics of every step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def losses(folder: Path, *overrides: str, first: int = 1) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step from `first` on."""
    done = subprocess.run(
        command(folder, *overrides), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [(row["loss"], row["grad_norm"]) for row in rows_of(folder) if row["step"] >= first]


def printed_by_ranks(program: str, ranks: int) -> list[Any]:
    """Return what the processes of a test file print as lines of JSON, each a list."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += [f"--nproc-per-node={ranks}", program]
    paths = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(row) for row in done.stdout.splitlines() if row.startswith("[")]


@contextmanager
def no_waits() -> Iterator[None]:
    """An operation that waits for the device raises."""
    torch.cuda.synchronize()
    try:
        # Once per process it warns that it is a prototype, having set the mode: where that is an
        # error, it would stay set, and fail whatever comes next.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
