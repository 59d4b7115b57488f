"""Jobs of a sweep side by side, each on a GPU of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.programs import GPUS, ROOT, SMALL, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]


def sweep(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "train.py"), "-m", *SMALL, *overrides]
    line += [f"data.cache_dir={folder}/cache", f"hydra.sweep.dir={folder}/s"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_jobs_train_at_the_same_time_on_gpus_of_their_own(tmp_path: Path):
    """A job of two ranks has no place."""
    words = ("train.steps=400", "precision=bf16", "optim.lr=1e-3,2e-3", "parallel.dp=1,2")
    done = sweep(tmp_path, *words, "sweep.gpus_per_job=1", "sweep.jobs_at_once=2")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads((tmp_path / "s/sweep.json").read_text())["jobs"]
    assert [job["state"] for job in jobs] == ["done", "skipped"] * 2
    assert "sweep.gpus_per_job=1: a job of 2 ranks needs as many GPUs" in jobs[1]["reason"]
    times = [[row["time"] for row in rows_of(tmp_path / "s" / jobs[n]["folder"])] for n in (0, 2)]
    assert max(each[0] for each in times) < min(each[-1] for each in times)


def test_more_gpus_than_there_are_is_one_line(tmp_path: Path):
    done = sweep(tmp_path, "train.steps=2,3", f"sweep.gpus_per_job={GPUS + 1}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"sweep.gpus_per_job={GPUS + 1}: this host has {GPUS} GPUs" in done.stderr
