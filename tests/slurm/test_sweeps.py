"""Sweeps through SLURM: submitit over two nodes and put back into the queue; and the commands of
docs/cluster.md and docs/reliability.md.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.engine.files.checkpoints import newest_checkpoint
from app.engine.files.run_folder import read_metrics
from tests.slurm.conftest import Cluster
from tests.training import LONG, ROOT, losses, wait_for

pytestmark = pytest.mark.slurm
PAGES = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("cluster", "reliability"))
BLOCKS = [  # those that this cluster can run
    block
    for block in re.findall(r"```bash\n(.*?)```", PAGES, re.DOTALL)
    if not re.search(r"node1|app\.cli\.plan|export ", block)
]
WAIT = 'while [ -n "$(squeue --noheader)" ]; do sleep 0.2; done\n'


def test_submitit_over_two_nodes_put_back_into_the_queue(
    cluster: Cluster, corpus: tuple[str, ...], undisturbed: dict[int, float]
):
    """Two jobs: one is interrupted by submitit's signal and goes on, the other has a mistake
    that only the job can find.
    """
    launcher = (
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.nodes=2",
        "hydra.launcher.cpus_per_task=1",
        "hydra.sweep.dir=sweeps/two",
    )
    command = [
        "train.py",
        "-m",
        *launcher,
        *corpus,
        *LONG,
        "parallel.dp=2",
        "train.seq_len=32,99999999",
    ]
    sweep = subprocess.Popen(
        [sys.executable, *command],
        cwd=cluster.folder,
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    run_dir = cluster.folder / "sweeps/two/0_seq_len-32"
    wait_for(lambda: newest_checkpoint(run_dir) or sweep.poll() is not None)
    assert sweep.poll() is None, sweep.communicate()[0]
    job = cluster.run("squeue", "--noheader", "--states=RUNNING", "--format=%A").split()[0]
    cluster.run("scancel", "--signal=USR2", job)
    output = sweep.communicate(timeout=200)[0]
    assert sweep.returncode == 1, output
    assert losses(run_dir) == undisturbed, output
    done, failed = json.loads((run_dir.parent / "sweep.json").read_text())["jobs"]
    assert (done["state"], done["folder"], done["reason"]) == ("done", "0_seq_len-32", None)
    assert (failed["state"], failed["folder"]) == ("failed", "1_seq_len-99999999")
    assert failed["reason"].startswith("train.seq_len=99999999: the training split has only")
    assert "stopped by SIGUSR2 after step" in "".join(
        path.read_text() for path in run_dir.parent.glob(".submitit/*/*.err")
    )


SUBMIT = ("-m", "hydra/launcher=submitit_slurm", "+experiment=smoke", "train.steps=1,2")


def test_without_slurm(tmp_path: Path):
    command, env = (
        [sys.executable, str(ROOT / "train.py"), *SUBMIT],
        {"PATH": "", "PYTHONPATH": str(ROOT)},
    )
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    said = (
        "no SLURM on this machine: sbatch is missing; leave it out: the default is "
        "hydra/launcher=torchrun"
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"train.py: hydra/launcher=submitit_slurm: {said}\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_what_slurm_refuses_costs_a_line_and_stays_on_record(cluster: Cluster, tmp_path: Path):
    """Here for an option of the job, in place of what sbatch itself prints; as without a
    controller.
    """
    command = [sys.executable, str(ROOT / "train.py"), *SUBMIT, "hydra.launcher.partition=nowhere"]
    done = subprocess.run(command, cwd=tmp_path, env=cluster.env, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(
        "train.py: hydra/launcher=submitit_slurm: invalid partition specified: nowhere; "
    )
    assert [path.name for path in tmp_path.rglob("*.json")] == ["sweep.json"]
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_the_commands_of_the_pages(cluster: Cluster):
    """In their order, in one shell, each after the jobs of those before it have ended."""
    assert len(BLOCKS) == 7
    script = "set -eo pipefail\n" + "".join(block + WAIT for block in BLOCKS)
    before = set(cluster.folder.glob("slurm-*.log"))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=cluster.folder,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = [
        path.stem.removeprefix("slurm-")
        for path in set(cluster.folder.glob("slurm-*.log")) - before
    ]
    assert len(jobs) == 3 and {cluster.state(job) for job in jobs} == {"COMPLETED"}
    folders = [
        path
        for path in (*cluster.folder.glob("runs/*"), *cluster.folder.glob("sweeps/*/*"))
        if (path / "loss.png").exists()
    ]
    finished = [path for path in folders if read_metrics(path)[-1]["step"] == 10]
    assert len(finished) == 1 + 2 + 2 + 3, (
        "a job, two tasks of an array, two jobs of submitit, the three runs of reliability.md"
    )
    assert "optim.lr=0.003" in done.stdout and "parallel=dp2" in done.stdout
