"""Runs on whole documents, and on Megatron-LM's files: equal numbers on any ranks and resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.data.test_megatron import write
from tests.distributed import run_distributed
from tests.processes.test_blended_runs import trained
from tests.training import TINY, composed, untimed


def go(folder: Path, *more: str, ranks: int = 1) -> str:
    """Train on ids of bytes that Megatron's files hold; what rank 0 prints, or its mistake."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(4, 24, 120).tolist()
    write(folder / "d/a", [[[*draw.integers(0, 256, size).tolist(), 256]] for size in lengths])
    settings = (
        *TINY, "data=megatron", f"data.path={folder}/d/a", f"data.cache_dir={folder}/cache",
        "data.document_mask=true", "data.packing=best_fit", "train.steps=4", "log.console=true",
        "log.verbose=true", "checkpoint.interval=2",
    )  # fmt: skip
    return run_distributed(trained, ranks, folder, composed((*settings, *more), ranks))[0]


def test_runs_of_whole_documents_resume_exactly(tmp_path: Path):
    told = go(tmp_path, "run_dir=whole")
    assert "of positions are padding, as data.packing=best_fit cuts no document that fits" in told
    rows = untimed(tmp_path / "whole")
    saved = "resume=whole/checkpoints/step-00000002"
    go(tmp_path, saved, "run_dir=again")
    again = untimed(tmp_path / "again")
    assert [row for row in again if row["step"] > 2 and "loss" in row] == [
        row for row in rows if row["step"] > 2 and "loss" in row
    ]
    go(tmp_path, saved, "run_dir=two", "parallel.dp=2", ranks=2)
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    found = {row["step"]: row["loss"] for row in untimed(tmp_path / "two") if "loss" in row}
    assert found.keys() >= {3, 4}
    assert {step: pytest.approx(losses[step], rel=1e-5) for step in found} == found
    told = go(tmp_path, saved, "run_dir=other", "data.packing=stream")
    assert "data.packing=stream" in told and "was trained with" in told
