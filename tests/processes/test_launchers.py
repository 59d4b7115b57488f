"""Supervisors and launchers at moments that drawn deaths seldom meet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.processes.launcher import Launch
from app.cli.start.supervised import supervise
from tests.ports import free_port
from tests.training import ROOT, wait_for

DIES = """
import os, pathlib, signal
file = pathlib.Path({count!r})
file.write_text(file.read_text() + "." if file.exists() else ".")
if len(file.read_text()) == {lives}:
    pathlib.Path(os.environ["GRAPHFOLD_RANK_PROGRESS"]).write_text("ended with 75")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("lives", [1, 2])
def test_rank_killed_after_its_work_is_not_started_again(
    lives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    count = tmp_path / "count"
    program = DIES.format(count=str(count), lives=lives)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", program])
    launch = Launch(1, 1, 2, master=("127.0.0.1", 1), one_host=True)
    assert supervise(launch, os.environ) == 75
    assert count.read_text() == "." * lives


NODE_LOST = """
import os, signal, sys
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGKILL)
sys.exit(7)
"""


def test_launcher_that_waits_for_a_lost_node_ends_when_told(tmp_path: Path):
    (tmp_path / "rank.py").write_text(NODE_LOST)
    port = free_port()
    torchrun = [sys.executable, "-m", "app.cli.torchrun", "--nnodes=2", "--max-restarts=3"]
    torchrun += ["--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-endpoint=127.0.0.1:{port}"]
    said = tmp_path / "said"
    with said.open("wb") as file:
        nodes = [
            subprocess.Popen(
                [*torchrun, f"--rdzv-conf=is_host={host}", "--local-addr=127.0.0.1", "rank.py"],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"},
                stderr=file,
            )
            for host in (1, 0)
        ]
    try:
        wait_for(lambda: nodes[1].poll() or nodes[0].poll())
        wait_for(lambda: b"starting the ranks again" in said.read_bytes())
        survivor = next(each for each in nodes if each.poll() is None)
        survivor.send_signal(signal.SIGTERM)
        assert survivor.wait(60) == 75  # not after ten minutes
    finally:
        for node in nodes:
            node.kill()
            node.wait()
