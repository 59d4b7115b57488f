"""Supervisors and launchers at moments that drawn deaths seldom meet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import torchrun
from app.cli.processes.launcher import Launch
from app.cli.start.supervised import supervise
from tests.forks import Process
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


ENDS = """
import os, pathlib, signal, sys, time
rank, folder, end = os.environ["RANK"], pathlib.Path(sys.argv[1]), sys.argv[2]
file = folder / f"began-{rank}-{len(list(folder.glob(f'began-{rank}-*')))}"
file.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
file.with_suffix(".new").rename(file)
first = [folder / f"began-{rank}-0" for rank in (0, 1)]
while not all(each.exists() for each in first):
    time.sleep(0.01)
if rank == "0" or len(list(folder.glob("began-1-?"))) > 1:
    sys.exit()
other, launcher = map(int, first[0].read_text().split())
while os.path.exists(f"/proc/{other}"):  # until its launcher has noticed its end
    time.sleep(0.01)
if end == "told":
    os.kill(launcher, signal.SIGTERM)
    while os.path.exists(f"/proc/{launcher}"):
        time.sleep(0.01)
    sys.exit()
os.kill(os.getppid() if end == "lost" else os.getpid(), signal.SIGKILL if end == "lost" else 15)
time.sleep(600)
"""
C10D = "--rdzv-backend=c10d --rdzv-id=x --rdzv-endpoint=127.0.0.1:{port} --local-addr=127.0.0.1"
STATIC = "--master-addr=127.0.0.1 --master-port={port}"
# with which of the launchers, and what hits rank 1 or a launcher when rank 0 has ended with 0:
# exit codes, and starts of each rank
ENDS_LATE = {
    "killed": (C10D, 0, [0, 143], 1),
    "killed, restarts": (C10D, 2, [0, 0], 2),
    "killed, by address": (STATIC, 2, [0, 143], 1),
    "told": (C10D, 0, [0, 0], 1),
    "lost": (C10D, 2, [0, -signal.SIGKILL], 1),
}


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.full) if each == "lost" else each
             for each in ENDS_LATE]
)  # fmt: skip
def test_launcher_waits_at_the_end_for_no_node_that_has_failed(case: str, tmp_path: Path):
    """Not for the five minutes of torch's barrier."""
    how, restarts, codes, starts = ENDS_LATE[case]
    (tmp_path / "rank.py").write_text(ENDS)
    words = [f"--max-restarts={restarts}", *how.format(port=free_port()).split()]
    program = [str(tmp_path / "rank.py"), str(tmp_path), case.partition(",")[0]]

    def launch(node: int) -> None:
        own = f"--node-rank={node}" if how == STATIC else f"--rdzv-conf=is_host={1 - node}"
        os.dup2(os.open(tmp_path / f"said-{node}", os.O_CREAT | os.O_WRONLY), 2)
        os._exit(torchrun.main(["--nnodes=2", "--nproc-per-node=1", *words, own, *program]))

    nodes = [Process(target=launch, args=(node,)) for node in (0, 1)]
    try:
        for node in nodes:
            node.start()
        for node in nodes:
            node.join(60)
        said = [(tmp_path / f"said-{node}").read_text() for node in (0, 1)]
        assert [node.exitcode for node in nodes] == codes, said
        assert sorted(path.name for path in tmp_path.glob("began-*")) == [
            f"began-{rank}-{start}" for rank in (0, 1) for start in range(starts)
        ]
    finally:
        for node in nodes:
            node.kill()
            node.join()


NODE_LOST = """
import os, signal, sys
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGKILL)
sys.exit(7)
"""


def test_launcher_that_waits_for_a_lost_node_ends_when_told(tmp_path: Path):
    (tmp_path / "rank.py").write_text(NODE_LOST)
    port = free_port()
    agent = [sys.executable, "-m", "app.cli.torchrun", "--nnodes=2", "--max-restarts=3"]
    agent += ["--rdzv-backend=c10d", "--rdzv-id=run", f"--rdzv-endpoint=127.0.0.1:{port}"]
    said = tmp_path / "said"
    with said.open("wb") as file:
        nodes = [
            subprocess.Popen(
                [*agent, f"--rdzv-conf=is_host={host}", "--local-addr=127.0.0.1", "rank.py"],
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
