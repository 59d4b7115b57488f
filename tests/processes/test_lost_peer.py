"""A rank whose connection to another one has ended says so in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.engine.files.attempt import Attempt
from app.engine.files.run_folder import read_metrics
from app.engine.ranks.lost import lost_connection
from app.engine.run import train as training
from app.planner.plan import Plan
from tests.training import ROOT, composed, corpus_in, wait_for

READ = (
    "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer. This is "
    "typically caused by a remote worker hanging"
)
LINE = (
    "rank 0: lost its connection to another rank (Connection reset by peer); that rank or its "
    "launcher says why; log.verbose=true prints the trace"
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(READ), LINE),
        (RuntimeError(f"Gloo connectFullMesh failed with {READ}"), None),
        (RuntimeError("[gloo/x.cc:1] op.preamble.length <= op.nbytes. 8 vs 4"), None),
        (ValueError("Broken pipe"), None),
    ],
)
def test_only_the_end_of_a_connection_is_told_as_one(error: Exception, line: str | None):
    assert lost_connection(error, 0) == line


@pytest.mark.parametrize("verbose", [False, True])
def test_a_rank_that_has_lost_another_ends_with_one(
    verbose: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def lose(*given: object, **options: object) -> int:
        raise RuntimeError(READ)

    monkeypatch.setattr(training, "train_together", lose)
    plan = Plan(composed((f"log.verbose={str(verbose).lower()}", "train.device=cpu"), 1))
    if verbose:
        with pytest.raises(RuntimeError, match="Read error"):
            training.train(plan, 0, 0, Attempt())
    else:
        assert training.train(plan, 0, 0, Attempt()) == 1
    assert capfd.readouterr().err == ("" if verbose else f"{LINE}\n")


@pytest.mark.full
def test_the_ranks_left_by_a_killed_one_say_a_line_at_most(tmp_path: Path):
    """No line if the launcher ends them before they notice."""
    corpus, said = corpus_in(tmp_path / "corpus"), tmp_path / "said"
    words = (*corpus, "parallel.dp=2", "train.steps=100000", "run_dir=run")
    launcher = ("-m", "app.cli.torchrun", "--standalone", "--nproc-per-node=2")
    with said.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "train.py"), *words],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
            stderr=file,
        )
    run = tmp_path / "run"
    wait_for(lambda: (run / "metrics.jsonl").exists() and len(read_metrics(run)) > 2)
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    assert process.wait(120) == 128 + signal.SIGKILL
    lines = said.read_text().splitlines()  # a slow host also tells how far preparing is
    *left, ended = (line for line in lines if not line.startswith("preparing "))
    assert len(left) <= 1
    for line in left:
        assert re.fullmatch(r"rank 0: lost its connection to another rank \(.*\); .* trace", line)
    assert re.fullmatch(r"torchrun: rank 1 \(process \d+\) was ended by SIGKILL", ended)
