"""`train.profile` records three steps, changes no number, and is read by `explain`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from app.config import Run
from app.engine.files.trace_sums import PROFILE, SUMS, TRACE, read_trace
from app.errors import ConfigError
from tests.config import load
from tests.distributed import run_distributed
from tests.training import composed, corpus_in, losses, train_rank


def trained(rank: int, run: Run) -> bool:
    return train_rank(rank, run, {})[0]


def run_in(folder: Path, ranks: int, *typed: str) -> Run:
    words = ("train.steps=6", "train.eval_interval=0", "checkpoint.interval=0", *typed)
    corpus = corpus_in(folder.parent / "corpus")
    run = composed((*corpus, *words, f"parallel.dp={ranks}", f"run_dir={folder}"), ranks)
    assert all(run_distributed(trained, ranks, run))
    return run


@pytest.mark.every(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_steps_are_recorded_and_losses_stay(tmp_path: Path, ranks: int):
    run_in(tmp_path / "plain", ranks)
    run_in(tmp_path / "profiled", ranks, "train.profile=3")
    assert losses(tmp_path / "plain") == losses(tmp_path / "profiled")
    assert not (tmp_path / "plain" / PROFILE).exists()
    folder = tmp_path / "profiled" / PROFILE
    assert {path.name for path in folder.iterdir()} == {TRACE, SUMS}
    with gzip.open(folder / TRACE) as file:
        names = {each.get("name") for each in json.load(file)["traceEvents"]}
    assert "aten::mm" in names or "aten::addmm" in names
    sums = read_trace(tmp_path / "profiled")
    assert sums is not None and (sums.first, sums.last) == (3, 5)
    assert sums.parts["GEMMs"] > 0 and sums.compute_ms is None
    assert (sums.parts.get("communication", 0) > 0) == (ranks > 1)


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        (("train.profile=0",), "must be at least 1"),
        (("train.profile=9",), r"at most 8: of train.steps=10, 3 are profiled; did you mean 8"),
        (("train.profile=3", "cuda_graph=full_iteration"), "at least 5, after the step"),
        (("train.profile=1", "train.steps=2"), "train.steps=2 leaves fewer"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(typed: tuple[str, ...], rule: str):
    with pytest.raises(ConfigError, match=rule):
        load("model=dense_tiny", "train.steps=10", *typed)
