"""Adapters on a GPU: graphs change no bit of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.programs import GPUS, GRAPHS, losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
FIXED = ("train.steps=10", "parallel.dp=1", "lora.rank=8", "optim.lr=1e-2")


@pytest.mark.parametrize("model", ["moe_tiny", "dense_tiny"])
def test_a_run_with_graphs_repeats_one_without(tmp_path: Path, model: str):
    fixed = (*FIXED, f"model={model}", "precision=bf16")
    eager = losses(tmp_path / "eager", *fixed)
    for name, graph in GRAPHS.items():
        assert losses(tmp_path / name, *fixed, *graph) == eager, name
