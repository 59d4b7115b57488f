"""Jobs of a real SLURM: over two nodes, told to stop, preempted, cancelled, with a rank killed;
and mistakes.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from app.engine.files.checkpoints import complete_checkpoints, newest_checkpoint
from app.engine.files.run_folder import METRICS, read_metrics
from tests.slurm.conftest import JOB_S, Cluster
from tests.training import LONG, ROOT, losses, wait_for

pytestmark = pytest.mark.slurm


def ranks_of(job: str, marked: bytes = b"RANK") -> list[int]:
    """Process ids of a job's ranks, in rank order, that have a variable."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            env = dict(
                line.split(b"=", 1)
                for line in (process / "environ").read_bytes().split(b"\0")
                if b"=" in line
            )
        except OSError:  # it has ended meanwhile
            continue
        if (
            b"train.py" in command
            and b"app.cli.torchrun" not in command
            and env.get(b"SLURM_JOB_ID") == job.encode()
            and marked in env
        ):
            found[int(env[b"RANK"])] = int(process.name)
    return [found[rank] for rank in sorted(found)]


def test_over_two_nodes_a_rank_killed_and_the_time_over(
    cluster: Cluster, corpus: tuple[str, ...], undisturbed: dict[int, float]
):
    job = cluster.train(*corpus, *LONG, "log.console=true")
    run_dir = cluster.folder / f"runs/slurm-{job}"
    cluster.meanwhile(job, lambda: newest_checkpoint(run_dir))
    killed = ranks_of(job)
    os.kill(killed[1], signal.SIGKILL)
    cluster.meanwhile(job, lambda: "after step" in cluster.log(job))  # the ranks have started again
    step = len(losses(run_dir))
    cluster.meanwhile(job, lambda: len(losses(run_dir)) > step)
    cluster.run("scancel", "--signal=USR1", "--batch", job)  # as SLURM does before the time limit
    cluster.requeued(job)
    saved = complete_checkpoints(run_dir / "checkpoints")[-1]
    step, said = int(saved.name.removeprefix("step-")), cluster.log(job)
    assert (
        f"train.py: stopped by SIGUSR1 after step {step}, saved "
        f"runs/slurm-{job}/checkpoints/{saved.name}" in said
    )
    assert (
        f"torchrun: rank 1 (process {killed[1]}) was ended by SIGKILL; starting the ranks again"
        in said
    )
    assert "the run ended with 75 before its last step: back into the queue" in said
    assert len(losses(run_dir)) == step, "no step after the checkpoint"
    assert cluster.ended(job) == "COMPLETED" and cluster.facts(job)["Restarts"] == "1"
    assert losses(run_dir) == undisturbed
    assert re.search("2 processes of .*: dp 2, ep 2$", cluster.log(job), re.MULTILINE)


def test_rank_killed_over_two_nodes_continues_in_place(
    cluster: Cluster, corpus: tuple[str, ...], undisturbed: dict[int, float]
):
    copies = ("checkpoint.memory_every=1", "checkpoint.interval=1000")
    job = cluster.train(*corpus, *LONG, *copies, "log.console=true")
    run_dir = cluster.folder / f"runs/slurm-{job}"
    metrics = run_dir / METRICS
    cluster.meanwhile(job, lambda: metrics.exists() and len(read_metrics(run_dir)) > 20)
    before = ranks_of(job, b"GRAPHFOLD_RANK_RESTARTS")
    os.kill(before[1], signal.SIGKILL)
    cluster.meanwhile(job, lambda: "ranks started again: 1; back from" in cluster.log(job))
    after = ranks_of(job, b"GRAPHFOLD_RANK_RESTARTS")
    assert after[0] == before[0] and after[1] != before[1]
    assert cluster.ended(job) == "COMPLETED" and cluster.facts(job)["Restarts"] == "0"
    said = cluster.log(job)
    told = f"train.py: rank 1 (process {before[1]}) was ended by SIGKILL; starting it again"
    assert told in said and "starting the ranks again" not in said
    step, to, phases = re.search(r"back from step (\d+) to (\d+), from copies (.*)", said).groups()
    assert int(step) - int(to) <= 1
    assert re.fullmatch(r"in memory, in .* s: notice .*, abort .*, rejoin .*, state .*", phases)
    print(f"recovery over two nodes: {phases}")
    assert losses(run_dir) == undisturbed


def test_preempted_and_then_cancelled(
    cluster: Cluster, corpus: tuple[str, ...], undisturbed: dict[int, float]
):
    """A preempted job comes back and goes on; a cancelled one saves too, and stays cancelled."""
    job = cluster.train(*corpus, *LONG, "train.steps=100000", "log.wandb=true")
    run_dir = cluster.folder / f"runs/slurm-{job}"
    cluster.meanwhile(job, lambda: newest_checkpoint(run_dir))
    urgent = cluster.run(
        "sbatch",
        "--parsable",
        "--partition=urgent",
        "--nodes=2",
        "--exclusive",
        "--output=urgent",
        "--wrap=true",
    )
    cluster.requeued(job)
    step = int(newest_checkpoint(run_dir).name[5:])
    # SLURM sends SIGTERM to the ranks and to the script, which sends them SIGUSR1: either may come
    # first.
    assert (
        re.search("stopped by SIG(TERM|USR1) after step", cluster.log(job))
        and len(losses(run_dir)) == step
    )
    assert cluster.ended(urgent) == "COMPLETED"
    cluster.meanwhile(job, lambda: len(losses(run_dir)) > step + 20)
    cluster.run("scancel", job)
    assert cluster.ended(job) == "CANCELLED"
    wait_for(lambda: cluster.log(job).count("train.py: stopped by SIG") == 2, JOB_S)
    # both nodes, twice
    wait_for(lambda: cluster.log(job).count("Exited with exit code 75") == 4, JOB_S)
    assert cluster.state(job) == "CANCELLED"
    seen = losses(run_dir)
    assert f"step-{len(seen):08d}" == newest_checkpoint(run_dir).name
    both = seen.keys() & undisturbed.keys()
    assert len(both) > step and {key: seen[key] for key in both} == {
        key: undisturbed[key] for key in both
    }


def test_mistakes_cost_a_line_and_are_not_tried_again(cluster: Cluster, corpus: tuple[str, ...]):
    """A mistake in the run, and a folder in which another run is. A port that is taken costs
    nothing.
    """
    other = cluster.folder / "runs/other"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("model: {}")
    jobs = [
        cluster.train(*corpus, "data.path=[nowhere/*]"),
        cluster.train(*corpus, "run_dir=runs/other", "resume=null"),
    ]
    with socket.create_server(("", 20_000 + int(jobs[-1]) + 1)):
        jobs.append(cluster.train(*corpus, "train.steps=1"))
        assert [cluster.ended(job) for job in jobs] == ["FAILED", "FAILED", "COMPLETED"]
    assert [cluster.facts(job)["ExitCode"] for job in jobs] == ["2:0", "2:0", "0:0"]
    said = [
        [line for line in cluster.log(job).splitlines() if not line.startswith("srun: ")]
        for job in jobs[:2]
    ]
    assert [len(lines) for lines in said] == [1, 1]
    assert said[0][0].startswith("train.py: data.path=nowhere/*: matches no file")
    assert said[1][0].startswith("train.py: run_dir=runs/other: holds another run")


def test_array_tasks_without_a_line(cluster: Cluster):
    (cluster.folder / "one.txt").write_text("train.steps=2\n")
    job = cluster.run(
        "sbatch",
        "--parsable",
        "--array=2",
        "--gpus-per-node=0",
        "--cpus-per-task=1",
        "scripts/sweep.sbatch",
        "one.txt",
    )
    assert cluster.ended(f"{job}_2") == "FAILED"
    assert (
        cluster.log(f"{job}_2")
        == "sweep.sbatch: line 2 of one.txt is missing or empty; it has 1 lines\n"
    )


def test_array_of_an_installed_package_needs_no_python_yet(
    cluster: Cluster, corpus: tuple[str, ...], tmp_path: Path
):
    """Its Python comes with the setup, as modules do; train.sbatch lies beside the script."""
    (tmp_path / "share/graph fold").mkdir(parents=True)
    for name in ("train.sbatch", "sweep.sbatch"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "share/graph fold" / name)
    (tmp_path / "one.txt").write_text("train.steps=1\n")
    setup = f"export PATH={Path(sys.executable).parent}:$PATH"
    bare = ("env", "PATH=/usr/bin:/bin:/usr/sbin:/sbin", f"GRAPHFOLD_SETUP={setup}")
    options = ("--parsable", "--array=1", "--gpus-per-node=0", "--cpus-per-task=1")
    script = f"{tmp_path}/share/graph fold/sweep.sbatch"
    words = ("one.txt", "+experiment=smoke", *corpus)
    job = cluster.run(
        *bare, "sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), "sbatch", *options, script, *words
    )
    said = tmp_path / f"slurm-{job}_1.log"
    assert cluster.ended(f"{job}_1") == "COMPLETED", said.read_text()
    assert list(losses(tmp_path / f"sweeps/slurm-{job}/1")) == [1]


def test_a_lost_node_sends_a_job_back_into_the_queue(
    cluster: Cluster, corpus: tuple[str, ...], undisturbed: dict[int, float]
):
    """It gets two nodes again; one that is submitted with one node continues on that."""
    job = cluster.train(*corpus, *LONG, "log.console=true")
    run_dir = cluster.folder / f"runs/slurm-{job}"
    cluster.meanwhile(job, lambda: newest_checkpoint(run_dir))
    # its slurmd still runs, so that it soon comes back, as another node would
    cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
    assert cluster.ended(job) == "COMPLETED" and cluster.facts(job)["Restarts"] == "1"
    assert losses(run_dir) == undisturbed
    words = (f"run_dir=runs/slurm-{job}", "train.steps=155", "parallel.elastic=true")
    options = ("--nodes=1", "--gpus-per-node=1")
    job = cluster.train(*corpus, *LONG, *words, "log.console=true", options=options)
    assert cluster.ended(job) == "COMPLETED" and list(losses(run_dir))[-1] == 155
    assert "1 rank now: " in cluster.log(job) and "parallel.ep: 2 -> 1" in cluster.log(job)
