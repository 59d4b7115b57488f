"""Whole runs on GPUs: two ranks over NCCL like one, equal runs bit for bit, resuming bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
SMALL = ("train.micro_batch=2", "train.global_batch=8", "train.seq_len=256", "train.eval_interval=0", "log=none",
         "train.sample_tokens=0", "checkpoint=none", "data=text", "data.path=app/**/*.py")  # fmt: skip


def losses(folder: Path, *overrides: str, first: int = 1) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step from `first` on."""
    places = (f"run_dir={folder}", f"data.cache_dir={folder.parent}/cache")
    line = [sys.executable, str(ROOT / "train.py"), *SMALL, *places, *overrides]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row and row["step"] >= first]


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "layout",
    ["parallel.dp=2", "parallel.ep=2 parallel.dp=2", "parallel=tp2", "parallel=cp2", "parallel=pp2"],
)
def test_two_gpus_train_like_one(tmp_path: Path, layout: str):
    """fp32: equal up to the order of sums over ten steps. A route flips only after that."""
    one = losses(tmp_path / "one", "train.steps=10", "parallel.dp=1")
    two = losses(tmp_path / "two", "train.steps=10", *layout.split())
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in one], rel=1e-3)


@pytest.mark.parametrize("model", ["moe_tiny", "dense_tiny"])
def test_equal_runs_repeat_bit_for_bit(tmp_path: Path, model: str):
    overrides = ("train.steps=30", f"model={model}", "precision=bf16", "parallel.dp=1")
    assert losses(tmp_path / "a", *overrides) == losses(tmp_path / "b", *overrides)


def test_resuming_repeats_bit_for_bit(tmp_path: Path):
    overrides = ("precision=bf16", "optim.decay_steps=20", "checkpoint=default", "parallel.dp=1")
    whole = losses(tmp_path / "whole", *overrides, "train.steps=20", first=11)
    losses(tmp_path / "part", *overrides, "train.steps=10")
    assert losses(tmp_path / "part", *overrides, "train.steps=20", "resume=auto", first=11) == whole
