"""A SLURM cluster for the session, a checkout to submit from, and what an undisturbed run
computes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.slurm.cluster import missing_programs, two_nodes
from tests.training import LONG, ROOT, composed, corpus_in, losses, train_rank, wait_for

JOB_S = 300  # seconds that a job may take on a host with other work
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Cluster:
    """The cluster as a user of it, in a folder that has what a clone has."""

    env: Mapping[str, str]
    folder: Path

    def run(self, *command: str) -> str:
        """Output of a command; stderr too, where it fails."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=2 * JOB_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def train(
        self, *overrides: str, options: tuple[str, ...] = ("--nodes=2", "--gpus-per-node=1")
    ) -> str:
        """Submit scripts/train.sbatch; returns the job's id."""
        return self.run(
            "sbatch",
            "--parsable",
            "--cpus-per-task=1",
            *options,
            "scripts/train.sbatch",
            *overrides,
        )

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, …"""
        return self.facts(job)["JobState"]

    def facts(self, job: str) -> dict[str, str]:
        """What SLURM knows about a job."""
        return dict(
            word.split("=", 1)
            for word in self.run("scontrol", "show", "job", "-o", job).split()
            if "=" in word
        )

    def ended(self, job: str) -> str:
        """Wait for the end of a job; returns its state."""
        wait_for(lambda: self.state(job) in ENDS, JOB_S)
        return self.state(job)

    def meanwhile(self, job: str, condition: Callable[[], object]) -> None:
        """Wait until something holds, which should while the job is not over."""
        wait_for(lambda: condition() or self.state(job) in ENDS, JOB_S)
        assert condition(), f"{self.state(job)}\n{self.log(job)}"

    def requeued(self, job: str) -> None:
        """Wait until a job is back in the queue."""
        wait_for(lambda: self.state(job) in ("PENDING", *ENDS), JOB_S)
        assert self.state(job) == "PENDING", self.log(job)

    def log(self, job: str) -> str:
        """What a job has printed."""
        return (self.folder / f"slurm-{job}.log").read_text()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if os.getuid() or missing_programs():
        pytest.fail(
            f"needs root, and {', '.join(missing_programs()) or 'nothing else'}: make test-slurm"
        )
    folder = tmp_path_factory.mktemp("clone")
    for name in ("app", "conf", "docs", "scripts", "train.py", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(sys.prefix)
    with two_nodes() as env:
        paths = {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}", "PYTHONPATH": str(ROOT)}
        yield Cluster({**env, **paths}, folder)


@pytest.fixture(autouse=True)
def empty_queue(cluster: Cluster) -> Iterator[None]:
    """Cancel what a test that has failed leaves behind: it would hold up the tests after it."""
    yield
    for how in (("--signal=KILL", "--full"), ()):  # complains of a job that ends meanwhile
        words = ("scancel", *how, "--user=root")
        subprocess.run(words, env=cluster.env, capture_output=True, timeout=JOB_S, check=False)
    wait_for(lambda: not cluster.run("squeue", "--noheader"), JOB_S)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def undisturbed(
    corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, float]:
    """step -> loss of two ranks on this host that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run_distributed(train_rank, 2, composed((*corpus, *LONG, f"run_dir={folder}"), 2), {})
    return losses(folder)
