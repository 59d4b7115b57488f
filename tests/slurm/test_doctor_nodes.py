"""graphfold-doctor and train.sbatch as their users start them on two nodes: srun, salloc."""

from __future__ import annotations

import json
import sys

import pytest

from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


def test_doctor_checks_two_nodes_of_slurm(cluster: Cluster):
    doctor = [sys.executable, "-m", "app.cli.doctor", "--json"]
    told = json.loads(cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *doctor))
    found = {(each["check"], each["host"]): each["state"] for each in told["checks"]}
    assert told["hosts"] == 2 and told["exit_code"] == 0 and told["seconds"] < 60
    assert found["ports", "n1"] == found["ports", "n2"] == found["shared folder", "n2"] == "ok"


def test_train_sbatch_within_salloc(cluster: Cluster):
    words = ["+experiment=smoke", "train.steps=2", "parallel.ep=2", "run_dir=runs/interactive"]
    allocated = ("salloc", "--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1")
    cluster.run(*allocated, "bash", "scripts/train.sbatch", *words)
    assert '"step": 2' in (cluster.folder / "runs/interactive/metrics.jsonl").read_text()
