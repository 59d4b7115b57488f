"""A SLURM cluster of two nodes on this host, under one temporary folder: its own munge, ports, logs
and state.

Everything runs in the foreground as children of this process, so that ending them leaves nothing
behind.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.ports import free_ports

NODES = ("n1", "n2")
# seconds that a job put back into the queue waits, for the nodes to forget it; SLURM has 120
REQUEUE_S = 15
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_s}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=120
MinJobAge=600
MailProg=/bin/true
MpiDefault=none
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE \\
  GraceTime=120 MaxTime=60 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=60 State=UP
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8 Gres=gpu:8 "
    "State=UNKNOWN"
)


def missing_programs() -> list[str]:
    """Programs that the cluster needs and this host lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextmanager
def two_nodes() -> Iterator[Mapping[str, str]]:
    """Start the cluster; yields the environment in which sbatch, srun and the like talk to it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munge's socket lies below
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _start_munge(folder, stack)
        # Both nodes' threads share the cores of this host: those that wait must leave them to the
        # others.
        settings = {
            "SLURM_CONF": str(_write_conf(folder)),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        env = {**os.environ, **settings}
        for command in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in NODES)):
            _start(command, env, folder / f"{'-'.join(command)}.out", stack=stack)
        _wait(lambda: _idle_nodes(env) == len(NODES), "two idle nodes", folder)
        stack.callback(_cancel_all, env)
        yield env


def _start_munge(folder: Path, stack: ExitStack) -> None:
    home = folder / "munge"
    home.mkdir()
    key = home / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = [f"--{name}-file={home}/{name}" for name in ("key", "pid", "log", "seed")]
    _start(
        ["munged", "--foreground", f"--socket={home}/socket", *files],
        os.environ,
        home / "out",
        stack=stack,
    )
    _wait((home / "socket").exists, "munge's socket", folder)


def _write_conf(folder: Path) -> Path:
    (folder / "state").mkdir()
    host = socket.gethostname().split(".")[0]
    port, *ports = free_ports(1 + len(NODES))
    nodes = "\n".join(
        NODE.format(name=name, host=host, port=own) for name, own in zip(NODES, ports, strict=True)
    )
    conf = folder / "slurm.conf"
    conf.write_text(
        CONF.format(host=host, port=port, folder=folder, nodes=nodes, requeue_s=REQUEUE_S)
    )
    for number in range(8):
        (folder / f"gpu{number}").touch()  # stands for a device
    (folder / "gres.conf").write_text(
        f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-7]\n"
    )
    return conf


def _start(command: list[str], env: Mapping[str, str], output: Path, stack: ExitStack) -> None:
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    stack.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _idle_nodes(env: Mapping[str, str]) -> int:
    return _output(env, "sinfo", "--noheader", "--Node", "--partition=main", "--format=%T").count(
        "idle"
    )


def _cancel_all(env: Mapping[str, str]) -> None:
    _output(env, "scancel", "--user=root")
    deadline = time.monotonic() + 30
    while _output(env, "squeue", "--noheader") and time.monotonic() < deadline:
        time.sleep(0.5)


def _output(env: Mapping[str, str], *command: str) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True).stdout


def _wait(condition: Callable[[], bool], what: str, folder: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            logs = "".join(
                f"--- {log}\n{log.read_text()[-2000:]}" for log in sorted(folder.rglob("*.log"))
            )
            raise TimeoutError(f"waited {seconds:.0f} s for {what}\n{logs}")
        time.sleep(0.1)
