"""Whole runs on GPUs: two ranks over NCCL like one, equal runs bit for bit, resuming bit for
bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.programs import GPUS, losses, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    "layout",
    [
        "parallel.dp=2",
        "parallel.ep=2 parallel.dp=2",
        "parallel=tp2",
        "parallel=cp2",
        "parallel=pp2",
    ],
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


def test_half_precision_learns_and_its_scale_settles(tmp_path: Path):
    """fp16: the first scale is too large, so some steps are skipped, and no more once it has
    fallen.
    """
    overrides = (
        "precision=fp16",
        "train.steps=150",
        "parallel.dp=1",
        "precision.initial_loss_scale=1e9",
    )
    seen = losses(tmp_path / "run", *overrides)
    rows = rows_of(tmp_path / "run")
    assert rows[0]["skipped"] and not any(row["skipped"] for row in rows[-50:])
    assert rows[-1]["loss_scale"] < 1e9 and seen[-1][0] < seen[0][0] - 1


def test_saving_beside_training_holds_it_up_for_a_copy_only(tmp_path: Path):
    overrides = (
        "precision=bf16",
        "train.steps=40",
        "checkpoint=default",
        "checkpoint.interval=5",
        "parallel.dp=1",
    )
    losses(tmp_path / "run", *overrides)
    blocked = [
        row["checkpoint_blocked_ms"]
        for row in rows_of(tmp_path / "run")
        if "checkpoint_blocked_ms" in row
    ]
    assert len(blocked) >= 7
    print("blocked, ms:", [round(ms, 1) for ms in blocked])
