"""Causes of slow steps on GPUs, injected one at a time: a slow loader, a busy host, links without
peer access; and what a profile has.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from app.cli.plan import main
from app.data.feed import Batch
from app.engine.files.trace_sums import MEMORY, PROFILE, SUMS, TRACE, read_trace
from app.engine.ranks.groups import process_world
from app.engine.report.nvml import Nvml
from app.engine.step.records import StepInput, StepReport, StepTotals
from app.engine.step.step import TrainingStep
from tests.gpu.engine import engine_on
from tests.gpu.programs import GPUS, ROOT, command, rows_of
from tests.runs import batches_of, make_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
CYCLES = 2_000_000_000  # of a kernel: at least half a second at up to 4 GHz
WAIT_S = 0.2


def one_step(busy: int, reads_s: float, launches_s: float = 0.0) -> tuple[StepReport, float, float]:
    """A warm step of a tiny model: its report, and seconds of reading ahead and of launches.

    The GPU is busy for so many cycles behind its work. Reading the next batches and launching take
    at least so long.
    """
    run = make_run()
    took = {"read": 0.0, "launch": 0.0}
    with process_world(0, 1, torch.device("cuda:0")):
        step = TrainingStep(engine_on(run, "cuda:0"))
        step(batches_of(run, 0, 0), 1e-3, 0.1)
        passes = step.captured

        def slowly(given: StepInput) -> StepTotals:
            began = time.perf_counter()
            time.sleep(launches_s)
            totals = passes(given)
            torch.cuda._sleep(busy)
            took["launch"] = time.perf_counter() - began
            return totals

        def following() -> Sequence[Batch]:
            began = time.perf_counter()
            time.sleep(reads_s)
            found = batches_of(run, 2, 0)
            took["read"] = time.perf_counter() - began
            return found

        step.captured = step.eager = slowly
        report, _ = step(batches_of(run, 1, 0), 1e-3, 0.1, following)
    return report, took["read"], took["launch"]


def test_reading_costs_nothing_while_the_gpu_works():
    report, _, _ = one_step(CYCLES, WAIT_S)
    assert report.data_wait_ms < 1 and report.device_wait_ms is not None
    assert report.device_wait_ms > 100


def test_a_slow_loader_makes_the_gpu_wait():
    report, read, _ = one_step(0, WAIT_S)
    # all of it, but for the little that the GPU still had to do
    assert 1e3 * WAIT_S / 2 < report.data_wait_ms < 1e3 * read + 50


def test_a_busy_host_is_seen_in_launches():
    report, _, launch = one_step(0, 0.0, WAIT_S)
    assert report.launch_ms is not None and report.launch_ms >= 1e3 * launch > 1e3 * WAIT_S
    assert report.device_wait_ms is not None and report.device_wait_ms < report.launch_ms


def test_clock_and_processes_are_read():
    nvml = Nvml.of(torch.device("cuda:0"))
    assert nvml is not None
    clock, processes = nvml.clock(), nvml.processes()
    assert clock is not None and 0 < clock <= 1
    assert processes is not None and processes >= 0


def profiled(folder: Path, *overrides: str, **environment: str) -> None:
    """Train 14 steps, of which three are profiled."""
    typed = ("train.steps=14", "train.profile=8", "precision=bf16", "log.interval=2", *overrides)
    done = subprocess.run(
        command(folder, *typed),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("graphs", ["none", "full_iteration"])
def test_a_profile_has_kernels_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], graphs: str
):
    run = tmp_path / "run"
    model = ("model=dense_tiny", "parallel.dp=1", "hardware=h200")
    profiled(run, *model, f"cuda_graph={graphs}")
    assert {path.name for path in (run / PROFILE).iterdir()} == {TRACE, MEMORY, SUMS}
    sums = read_trace(run)
    assert sums is not None and (sums.first, sums.last) == (8, 10)
    assert sums.compute_ms is not None and sums.compute_ms > 0
    assert sums.exchange_ms == 0 and sums.parts["GEMMs"] > 0 and sums.kernels > 10
    settled = [row for row in rows_of(run) if row["step"] > 10]
    assert sums.compute_ms < max(row["step_ms"] for row in settled)
    assert all("launch_ms" in row and "device_wait_ms" in row for row in settled)
    assert any("gpu_clock" in row for row in settled)
    assert main(["explain", str(run)]) == 0
    out = capsys.readouterr().out
    assert "kernels take" in out and "the GPU had nothing to do" in out


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_links_without_peer_access_are_slower(tmp_path: Path):
    """The same run with and without NCCL_P2P_DISABLE on the same GPUs."""
    layout = ("model=dense_tiny", "parallel=tp2", "model.hidden_size=1024")
    profiled(tmp_path / "usual", *layout)
    profiled(tmp_path / "without", *layout, NCCL_P2P_DISABLE="1")
    usual, without = (read_trace(tmp_path / name) for name in ("usual", "without"))
    assert usual is not None and without is not None
    assert usual.exchange_ms is not None and without.exchange_ms is not None
    assert without.exchange_ms > usual.exchange_ms > 0
