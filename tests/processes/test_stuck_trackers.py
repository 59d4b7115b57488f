"""A stopped run whose tracker does not finish: it says what it saved, and ends with its code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app.engine.files.checkpoints import newest_checkpoint
from app.engine.files.signals import REPEAT_S, STOPPED
from app.engine.report.beside import Beside
from app.engine.report.sinks import Sink
from app.engine.step.records import ValidationReport
from tests.training import LONG, ROOT, corpus_in, wait_for

STUCK = """
import atexit, time
def wait(*args, **kwargs):
    time.sleep(150)
atexit.register(wait)
init = setup = wait
"""  # a package wandb whose service has died within a call


def test_a_stopped_run_leaves_its_tracker(capsys: pytest.CaptureFixture[str]):
    over = threading.Event()

    def stuck() -> Sink:
        over.wait(60)
        raise RuntimeError("no service")

    tracker = Beside("Weights & Biases", stuck)
    tracker.validation(ValidationReport(1, 2.5, 64))
    tracker.close(0.05)
    said = "Weights & Biases has not finished 0.05 s after the run was stopped; "
    assert capsys.readouterr().err == f"train.py: {said}metrics.jsonl has all metrics\n"
    over.set()
    tracker.close()


@pytest.mark.full
@pytest.mark.parametrize("signals", [1, 2])
def test_ranks_end_with_their_code_while_a_tracker_is_stuck(tmp_path: Path, signals: int):
    """The ranks get one signal, or another one while rank 0 waits for its tracker."""
    (tmp_path / "wandb.py").write_text(STUCK)
    words = (*corpus_in(tmp_path / "corpus"), *LONG, "train.steps=100000", "log.wandb=true")
    launcher = ("-m", "app.cli.torchrun", "--nproc-per-node=2", str(ROOT / "train.py"))
    process = subprocess.Popen(
        [sys.executable, *launcher, *words, "run_dir=run"],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    wait_for(lambda: newest_checkpoint(tmp_path / "run") is not None)
    process.send_signal(signal.SIGTERM)
    first = process.stderr.readline()
    assert "stopped by SIGTERM after step" in first, first + process.communicate()[1]
    if signals == 2:
        time.sleep(REPEAT_S + 0.5)
        process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == STOPPED, said
    assert said == "" if signals == 2 else "Biases has not finished 20 s" in said
