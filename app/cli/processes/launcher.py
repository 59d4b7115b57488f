"""Rank, world size and rendezvous of this process, read from the variables of torchrun or srun."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from app.cli.processes.parent import end_with_parent
from app.engine.ranks.address import LOOPBACK, loopback_address
from app.errors import ConfigError
from app.programs import PACKAGE, TYPED, command_name

STARTED_AS = "GRAPHFOLD_STARTED_AS"  # variable: command by which the parent of the ranks was typed
# variable: file into which rank 0 writes the name of its run folder, for the parent of the ranks
NOTED_IN = "GRAPHFOLD_FOLDER_NOTED_IN"
# ports for the rendezvous of SLURM tasks, below those that operating systems assign
FIRST_PORT, PORTS = 20_000, 10_000


MOST_PORT = 65_535


def ask_slurm(*command: str) -> str:
    """Run a SLURM command and return its output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of this process among those that torchrun or SLURM started."""

    rank: int  # global rank
    local_rank: int  # rank on this host
    world_size: int | None  # processes in all; None means started alone, without a launcher
    master: tuple[str, int] | None = None  # host and port of the rendezvous
    requeues: int = 0  # times that SLURM has requeued this job
    agent_store: bool = False  # torchrun's agent keeps a store at `master`, which outlives restarts
    one_host: bool = False  # all processes are on this host
    submitted: bool = False  # a function called by submitit, not a program
    launched: bool = False  # a program started by torchrun, or by srun as one of several tasks
    # command that started this program, printed as advice on how to continue a run
    command: str = field(default_factory=partial(command_name, "train"), compare=False)
    noted_in: Path | None = None  # file for the name of the run folder, for the parent

    @classmethod
    def from_environment(
        cls, env: Mapping[str, str], ask: Callable[..., str] = ask_slurm
    ) -> Launch:
        """Read torchrun's variables, or else srun's for one of several tasks; `ask` runs scontrol.

        Raises ConfigError for a variable that is missing, not a number, or contradicts another.
        """
        found = cls._placed(env, ask)
        typed = env.get(STARTED_AS) or started_as(sys.argv[0])
        several = "" if found.one_host else "with the same launcher: "
        noted_in = Path(env[NOTED_IN]) if NOTED_IN in env else None
        return replace(found, command=f"{several}{typed}", noted_in=noted_in)

    @classmethod
    def _placed(cls, env: Mapping[str, str], ask: Callable[..., str]) -> Launch:
        requeues = _number(env, "SLURM_RESTART_COUNT", 0)
        submitted = "SUBMITIT_EXECUTOR" in env
        if "RANK" in env and "WORLD_SIZE" in env:
            rank, local_rank, world_size = _place(env, "RANK", "LOCAL_RANK", ranks="WORLD_SIZE")
            return cls(
                rank,
                local_rank,
                world_size,
                master=_torchrun_master(env) if world_size > 1 or "MASTER_PORT" in env else None,
                agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                one_host=_on_one_host(env, world_size),
                launched="TORCHELASTIC_RUN_ID" in env,
                requeues=requeues,
                submitted=submitted,
            )
        # A batch script has SLURM_NTASKS too; only srun's tasks have SLURM_STEP_… A single task is
        # treated as started by hand, and may start ranks itself.
        if "SLURM_STEP_ID" in env and _number(env, "SLURM_NTASKS") > 1:
            rank, local_rank, world_size = _place(
                env, "SLURM_PROCID", "SLURM_LOCALID", ranks="SLURM_NTASKS"
            )
            one_host = env.get("SLURM_STEP_NUM_NODES") == "1"
            return cls(
                rank,
                local_rank,
                world_size,
                master=_slurm_master(env, ask, one_host=one_host),
                one_host=one_host,
                launched=not submitted,
                requeues=requeues,
                submitted=submitted,
            )
        return cls(0, 0, None, requeues=requeues, one_host=True, submitted=submitted)

    def end_with_launcher(self, parent: int) -> None:
        """Make this process end with its launcher, process `parent`, if it has one."""
        if self.launched:
            end_with_parent(parent)

    def network(self) -> dict[str, str]:
        """Return variables that keep gloo and NCCL on the loopback interface if all ranks are on
        this host.
        """
        if not self.one_host:
            return {}
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        # NCCL takes a name without = as a prefix, and "lo" would match others.
        return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def started_as(program: str) -> str:
    """Return the command that starts the program at this path: `python train.py`, or the name of
    an installed command.
    """
    path = Path(program)
    if path == PACKAGE / "cli" / "train.py":  # the path by which sweeps start their jobs
        return command_name("train")
    return f"python {shlex.quote(program)}" if path.suffix == ".py" else path.name


def take_name(env: Mapping[str, str]) -> None:
    """Let a rank or a job call the programs as the process that has started it does."""
    if env.get(STARTED_AS) in TYPED:
        sys.argv[0] = env[STARTED_AS]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(name, text, "must be a whole number; torchrun and srun set it") from None


def _place(
    env: Mapping[str, str], rank: str, local_rank: str, *, ranks: str
) -> tuple[int, int, int]:
    """Return rank, local rank and world size from the variables with these names."""
    world_size = _number(env, ranks)
    for name in (rank, local_rank):
        if not 0 <= (found := _number(env, name, 0)) < world_size:
            rule = f"must be from 0 to {world_size - 1}: {ranks} is {world_size}"
            raise ConfigError(name, found, rule)
    return _number(env, rank), _number(env, local_rank, 0), world_size


def _on_one_host(env: Mapping[str, str], world_size: int) -> bool:
    """Return whether all ranks are on this host: they meet at a loopback address, or
    LOCAL_WORLD_SIZE counts them all.
    """
    meet_here = loopback_address(env.get("MASTER_ADDR", "")) is not None
    return meet_here or _number(env, "LOCAL_WORLD_SIZE", 0) == world_size


def _torchrun_master(env: Mapping[str, str]) -> tuple[str, int]:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            rule = "is not set, but RANK and WORLD_SIZE are"
            raise ConfigError(name, "", rule, advice="start it with torchrun, which sets them all")
    return env["MASTER_ADDR"], _port(env)


def _port(env: Mapping[str, str], default: int | None = None) -> int:
    port = _number(env, "MASTER_PORT", default)
    if not 0 < port <= MOST_PORT:
        raise ConfigError("MASTER_PORT", port, f"must be 1 to {MOST_PORT}")
    return port


def _slurm_master(
    env: Mapping[str, str], ask: Callable[..., str], *, one_host: bool
) -> tuple[str, int]:
    """Return host and port of the rendezvous of a SLURM step: MASTER_ADDR or its first node, and
    MASTER_PORT or a port derived from the job id.
    """
    port = _port(env, FIRST_PORT + _number(env, "SLURM_JOB_ID") % PORTS)
    if one_host:
        return LOOPBACK, port
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"], port
    nodes = env.get("SLURM_STEP_NODELIST", "")
    try:
        return _first_node(nodes, port, ask), port
    except (OSError, subprocess.CalledProcessError, LookupError) as error:
        told = str(getattr(error, "stderr", "") or "").split("\n")[0]
        why = error.strerror if isinstance(error, OSError) else told or "its answer names none"
        rule = f"is not set, and scontrol cannot tell the first of the nodes {nodes} here: {why}"
        advice = "set it to the host of rank 0 before srun"
        raise ConfigError("MASTER_ADDR", "", rule, advice=advice) from None


def _first_node(nodes: str, port: int, ask: Callable[..., str]) -> str:
    """Return a name or address of the first of a step's nodes. Raises as `ask` does, and
    LookupError where SLURM's answer names none.
    """
    host = ask("scontrol", "show", "hostnames", nodes).split()[0]
    try:
        socket.getaddrinfo(host, port)
    except OSError:  # the node's name does not resolve; SLURM knows its address
        fields = ask("scontrol", "show", "node", "--oneliner", host).split()
        known = [field.removeprefix("NodeAddr=") for field in fields if "NodeAddr=" in field]
        return known[0]
    return host
