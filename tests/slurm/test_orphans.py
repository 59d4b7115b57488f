"""slurmstepd, which starts what a job runs on a host, is killed: its processes end too.

SLURM sees to the others that keep a step: srun has a second process that ends the step when the
first is killed, and a batch script's end ends its job. There is no case for these. Every case here
leaves processes training without app/cli/processes/slurm_step.py, but for ranks that srun has
started itself, which app/cli/processes/parent.py ends as well.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.engine.files.checkpoints import LATEST
from tests.slurm.conftest import Cluster
from tests.training import LONG, wait_for

pytestmark = pytest.mark.slurm
ORPHANS_S = 10  # seconds that processes may outlive what was killed
PYTHON = r"\S*python\S* "
SHELL = 'python train.py "$@"; true'  # not replaced by the program, as a script of one's own


@dataclass(frozen=True)
class Case:
    """How a run is started, and whose daemon is killed."""

    command: tuple[str, ...]  # before the overrides
    processes: int  # Python programs of the run
    step: str = "0"
    overrides: tuple[str, ...] = ()
    folder: str = "run_dir"  # the key of the run's or the sweep's


TWO = ("srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1")
ONE = ("--ntasks=1", "--cpus-per-task=2")
SUBMIT = ("-m", "hydra/launcher=submitit_slurm", "hydra.launcher.cpus_per_task=1")
CASES = {
    "ranks": Case((*TWO, "python", "train.py"), 2),
    "ranks below a shell": Case((*TWO, "bash", "-c", SHELL, "bash"), 2),
    "one task": Case(("srun", *ONE, "python", "train.py"), 4, overrides=("parallel.dp=2",)),
    "train.sbatch": Case(
        ("sbatch", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1", "scripts/train.sbatch"), 4
    ),
    "a batch script": Case(
        ("sbatch", *ONE, "job.sh"), 4, step="batch", overrides=("parallel.dp=2",)
    ),
    "submitit": Case(
        ("python", "train.py", *SUBMIT), 1, overrides=("parallel.ep=1",), folder="hydra.sweep.dir"
    ),
}


def processes(cluster: Cluster, job: str, line: str) -> list[int]:
    """Those of a job, on all its hosts, whose command lines match a pattern."""
    own, found = f"SLURM_CONF={cluster.env['SLURM_CONF']}", []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            variables = (process / "environ").read_text(errors="replace").split("\0")
            command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
            of_job = f"SLURM_JOB_ID={job}" in variables or f"slurmstepd: [{job}." in command
            if own in variables and of_job and re.match(line, command):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_process_outlives_its_daemon(cluster: Cluster, corpus: tuple[str, ...], name: str):
    case = CASES[name]
    (cluster.folder / "job.sh").write_text(f"#!/bin/bash\n{SHELL}\n")
    folder = f"orphans/{name.replace(' ', '-')}"
    long = (*LONG, "train.steps=100000", *case.overrides, f"{case.folder}={folder}")
    starter = subprocess.Popen(
        [*case.command, *corpus, *long],
        cwd=cluster.folder,
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    job = ""
    try:
        wait_for(lambda: list((cluster.folder / folder).rglob(LATEST)))
        (job,) = cluster.run("squeue", "--noheader", "--format=%A").split()
        assert len(processes(cluster, job, PYTHON)) == case.processes
        for pid in processes(cluster, job, rf"slurmstepd: \[{job}\.{case.step}\]"):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not processes(cluster, job, PYTHON), ORPHANS_S)
    finally:
        cluster.run("scancel", "--signal=KILL", "--full", "--user=root")
        starter.kill()
        print(starter.communicate()[0].decode())
        for pid in processes(cluster, job, f"{PYTHON}|srun "):  # which waits for the daemon
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not cluster.run("squeue", "--noheader"))
