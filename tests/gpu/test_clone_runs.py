"""Runs with clones of hot experts on two GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.gpu.programs import GPUS, losses, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
FIXED = (
    "model=moe_tiny",
    "precision=bf16",
    "parallel.dp=2",
    "parallel.ep=2",
    "model.moe.dispatcher=static",
    "optim.decay_steps=12",
)
CLONES = ("model.moe.echo.spares=2", "model.moe.echo.check=true")
PEER, COLLECTIVE = (f"model.moe.static.transport={name}" for name in ("peer", "collective"))


def test_transports_and_graphs_give_the_same_bits(tmp_path: Path):
    eager = losses(tmp_path / "eager", *FIXED, *CLONES, PEER, "train.steps=12")
    # other scopes and algorithms: bench/echo.sh
    for name, graph, transport in (
        ("whole", "full_iteration", PEER),
        ("collective whole", "full_iteration", COLLECTIVE),
    ):
        folder = tmp_path / name.replace(" ", "_")
        words = (*FIXED, *CLONES, transport, f"cuda_graph={graph}", "train.steps=12")
        assert losses(folder, *words) == eager, name
    rows = rows_of(tmp_path / "eager")
    assert all(row["moe_rank_load_after"] <= row["moe_rank_load_before"] for row in rows)
    assert sum(row["moe_clones"] for row in rows) > 0


def test_like_without_clones_and_across_a_checkpoint(tmp_path: Path):
    """In fp32 the first step equals that without clones, as does the first after a checkpoint.

    Later steps drift apart: Adam normalises gradients that are rounding errors alone to full size.
    """
    fp32 = (*FIXED, "precision=fp32", "checkpoint=default")
    plain = losses(tmp_path / "plain", *fp32, "train.steps=1")
    cloned = losses(tmp_path / "cloned", *fp32, *CLONES, "train.steps=6")
    assert cloned[0] == pytest.approx(plain[0], rel=1e-5)
    shutil.copytree(tmp_path / "cloned", tmp_path / "without")
    resumed = (*fp32, "train.steps=7", "resume=auto")
    (with_them,) = losses(tmp_path / "cloned", *resumed, *CLONES, first=7)
    (without,) = losses(tmp_path / "without", *resumed, first=7)
    assert without == pytest.approx(with_them, rel=1e-5)
