"""A rank that is killed while it trains on GPUs comes back in place, and changes no bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from app.engine.files.run_folder import METRICS
from tests.gpu.programs import GPUS, ROOT, command, losses, rows_of
from tests.processes.test_recovery import supervised, wait_for_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")]
STEPS, AT = 400, 100
WHOLE = (
    "cuda_graph=full_iteration model.moe.dispatcher=static model.moe.static.transport=collective"
)
CASES = {
    "dp": "parallel.dp=2",
    "ep, one graph": f"parallel.dp=2 parallel.ep=2 {WHOLE}",
    "update in the graph": f"parallel.dp=2 {WHOLE} cuda_graph.optimizer=true",
    "pp, partial graphs": "parallel=pp2 cuda_graph=partial",
    "every fifth": f"parallel.dp=2 {WHOLE} checkpoint.memory_every=5",
}


@pytest.mark.parametrize("name", CASES)
def test_killed_rank_changes_no_bit(name: str, tmp_path: Path):
    words = ("precision=bf16", f"train.steps={STEPS}", *CASES[name].split())
    every = () if "memory_every" in CASES[name] else ("checkpoint.memory_every=1",)
    plain = losses(tmp_path / "plain", *(word for word in words if "memory_every" not in word))
    folder = tmp_path / "killed"
    line = command(folder, *words, *every)
    with subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        wait_for_step(folder, AT, process)
        ranks = supervised(folder)
        since = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert [(row["loss"], row["grad_norm"]) for row in rows_of(folder)] == plain
    rows = map(json.loads, (folder / METRICS).read_text().splitlines())
    (told,) = [row for row in rows if "recovery_s" in row]
    print(name, f"ended {time.monotonic() - since:.1f} s after the kill:", told)
    assert told["recovery_ranks"] == 1
