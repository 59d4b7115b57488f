"""Processes of a run: what the launcher said, and starting the ranks of this host when nobody did."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from app.cli.parent import bound
from app.config import Run
from app.errors import ConfigError

ROOT = Path(__file__).parents[2]
CPU_RANKS_PER_CORE = 4  # more gloo processes than that only wait for each other
SUBMITIT_REQUEUES = -1  # exit code with which it leaves once SLURM has the job back in its queue
FIRST_PORT, PORTS = 20_000, 10_000  # where the tasks of SLURM jobs meet, below the ports that systems hand out


def ask_slurm(*command: str) -> str:
    """What a SLURM command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of this process among those that torchrun or SLURM started."""

    rank: int  # global rank
    local_rank: int  # rank on this host
    world_size: int | None  # processes in all; None: started by hand, alone
    master: tuple[str, int] | None = None  # host and port at which the processes meet
    requeues: int = 0  # times that SLURM has started this job again
    agent_store: bool = False  # at `master` is a key-value store that outlives restarts
    submitted: bool = False  # a function that submitit calls, not a program
    launched: bool = False  # a program that torchrun, or srun as one of several tasks, has started

    @classmethod
    def from_environment(cls, env: Mapping[str, str], ask: Callable[..., str] = ask_slurm) -> Launch:
        """Read what torchrun has set, else what srun has set for one of several tasks; `ask` runs scontrol."""
        job = {"requeues": int(env.get("SLURM_RESTART_COUNT", 0)), "submitted": "SUBMITIT_EXECUTOR" in env}
        if "RANK" in env and "WORLD_SIZE" in env:
            master = (env["MASTER_ADDR"], int(env["MASTER_PORT"])) if "MASTER_PORT" in env else None
            return cls(
                int(env["RANK"]),
                int(env.get("LOCAL_RANK", 0)),
                int(env["WORLD_SIZE"]),
                master,
                agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                launched="TORCHELASTIC_RUN_ID" in env,
                **job,
            )
        # A batch script has SLURM_NTASKS too; only srun's tasks have a step. One task alone may start ranks itself.
        if "SLURM_STEP_ID" in env and int(env["SLURM_NTASKS"]) > 1:
            rank, local_rank, world_size = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"))
            master = _slurm_master(env, ask)
            return cls(rank, local_rank, world_size, master, launched=not job["submitted"], **job)
        return cls(0, 0, None, **job)

    def rendezvous(self) -> dict[str, str]:
        """The variables by which torch finds where the processes meet.

        Raises ConfigError when that is at this rank, and another program has the port.
        """
        if self.master is None:
            return {}
        host, port = self.master
        if self.rank == 0 and not self.agent_store:
            _check_free(port)
        return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError("MASTER_PORT", port, "another program on this host has this port", "a free one") from error


def _slurm_master(env: Mapping[str, str], ask: Callable[..., str]) -> tuple[str, int]:
    """Host and port at which the tasks of a step meet: its first node, and a port of this job's unless MASTER_PORT is set."""
    port = int(env.get("MASTER_PORT", FIRST_PORT + int(env["SLURM_JOB_ID"]) % PORTS))
    host = ask("scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]).split()[0]
    try:
        socket.getaddrinfo(host, port)
    except OSError:  # the name is known to SLURM only
        fields = ask("scontrol", "show", "node", "--oneliner", host).split()
        host = next(field.removeprefix("NodeAddr=") for field in fields if field.startswith("NodeAddr="))
    return host, port


def check_room(world_size: int, gpus: int) -> None:
    """Raise ConfigError when this host is too small for so many ranks; `gpus` is how many they may use, 0 for CPU."""
    most = gpus or CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if world_size > most:
        what = "GPUs" if gpus else "processes on its cores"
        rule = f"this host has room for {most} {what}; torchrun joins several hosts"
        raise ConfigError("parallel.dp", world_size, rule, most)


def carry_out(run: Run, launch: Launch, script: str, env: MutableMapping[str, str]) -> int:
    """Train on this rank, or start the ranks that the layout asks for; returns the exit code. Raises ConfigError."""
    env.update(launch.rendezvous())
    # torch is loaded here, after the first mistakes have been reported.
    from app.engine.attempt import Attempt
    from app.engine.start import preflight, usable_gpus
    from app.engine.trainer import train
    from app.plan.plan import Plan

    attempt = Attempt(launch.requeues, launch.master if launch.agent_store else None)
    if launch.world_size is not None or run.world_size == 1:
        return train(Plan(run), launch.rank, launch.local_rank, attempt)
    check_room(run.world_size, usable_gpus(run))
    preflight(run, attempt.earlier(run.run_dir))
    return start_ranks(run.world_size, script, given_overrides(sys.argv[1:]), env)


def start_ranks(world_size: int, script: str, overrides: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `script` as `world_size` ranks of this host under torchrun and return the exit code of the first rank to fail.

    Being told to end, this process passes it on and waits, so that no rank is left behind; killed, it takes them along.
    """
    threads = str(max(1, (os.cpu_count() or 1) // world_size))
    # `app` need not be installed, nor be what the current folder calls so (-P).
    paths = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
    torchrun = [sys.executable, "-P", "-m", "app.cli.torchrun", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world_size}", script, *overrides]
    settings = {"OMP_NUM_THREADS": threads, **env, "PYTHONPATH": paths}
    process = subprocess.Popen(bound(command), env=settings)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, frame: process.send_signal(number))
    code = process.wait()
    return code if code >= 0 else 128 - code


def given_overrides(arguments: Sequence[str]) -> list[str]:
    """The overrides of this run: the program's arguments, or those of this job of a sweep."""
    config = HydraConfig.get()
    return list(config.overrides.task) if config.mode is RunMode.MULTIRUN else list(arguments)


@contextmanager
def settled(launch: Launch) -> Iterator[None]:
    """Let a job that submitit calls end even where it fails, having said so in its log.

    An exception would travel to the process that submitted the sweep, which would then no longer wait for the other jobs.
    """
    try:
        yield
    except SystemExit as ended:
        if not launch.submitted or ended.code == SUBMITIT_REQUEUES:
            raise
    except Exception:
        if not launch.submitted:
            raise
        traceback.print_exc()


def refuse_nested_sweep(launch: Launch, arguments: Sequence[str]) -> None:
    """Raise ConfigError for a sweep that was itself started as several ranks: each would start every job."""
    if launch.world_size is not None and {"-m", "--multirun"} & set(arguments):
        rule = f"one of {launch.world_size} ranks, but a sweep starts the ranks of each job"
        raise ConfigError("--multirun", f"rank {launch.rank}", rule, "python train.py -m …")
