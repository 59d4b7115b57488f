"""Supervisor of one rank: starts it again when a signal has killed it (`checkpoint.memory_every`).

The process that a launcher has started as a rank becomes the rank's supervisor, and runs the same
command as its child. So torchrun, srun or `start_ranks` see no death that the run survives. The
supervisor of rank 0 also keeps the store in which ranks meet, unless the launcher has one that
outlives ranks.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from app.cli.processes.launcher import Launch
from app.cli.processes.parent import bound
from app.config import Run
from app.engine.files.life import ENDED_WITH, Life
from app.engine.files.signals import handled, stop_signals
from app.errors import ConfigError
from app.programs import speaker

# Variables of a supervised rank: processes of this rank before, when the last one died (seconds
# since 1970), and the file into which the rank writes at its first copy in memory.
RESTARTS, DIED_AT, PROGRESS = (
    "GRAPHFOLD_RANK_RESTARTS",
    "GRAPHFOLD_RANK_DIED_AT",
    "GRAPHFOLD_RANK_PROGRESS",
)
MOST_RESTARTS = 100  # of one rank
# variables by which torchrun tells a rank that its store outlives ranks
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def is_supervised(env: Mapping[str, str]) -> bool:
    """Return whether this process is the child of a supervisor."""
    return RESTARTS in env


def life_of(env: Mapping[str, str]) -> Life:
    """Return which of its rank's processes this one is."""
    if not is_supervised(env):
        return Life()
    return Life(int(env[RESTARTS]), float(env[DIED_AT]), Path(env[PROGRESS]))


def check_supervisable(run: Run, launch: Launch) -> None:
    """Raise ConfigError for a rank that is no program, and where ranks cannot be started again."""
    every = run.checkpoint.memory_every
    if launch.submitted:
        rule = "starts ranks again by their command, and submitit calls a function"
        advice = "start it with srun or torchrun, or with the launcher graphfold of sweeps"
        raise ConfigError("checkpoint.memory_every", every, rule, advice=advice)
    if not sys.platform.startswith("linux"):
        rule = "starts ranks again, which is written for Linux"
        raise ConfigError("checkpoint.memory_every", every, rule, nearest=("null",))


def supervise(launch: Launch, env: Mapping[str, str]) -> int:
    """Run this process's command as a rank, again and again while signals kill it; return the exit
    code.

    A rank that dies twice without a copy in between, or MOST_RESTARTS times, is not started again:
    this process then ends by the same signal. Raises OwnError if the store's port is taken.
    """
    store = _kept_store(launch)  # noqa: F841 - lives as long as this process
    told: list[int] = []
    children: list[subprocess.Popen[Any]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if children:
            children[-1].send_signal(number)

    restarts, died_at, idle = 0, 0.0, 0
    # in memory: nothing stays behind if this process is killed
    with os.fdopen(os.memfd_create("progress"), "wb") as file, handled(stop_signals(), pass_on):
        progress = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        while True:
            ours = {RESTARTS: str(restarts), DIED_AT: str(died_at), PROGRESS: progress}
            command = bound([sys.executable, *sys.orig_argv[1:]])
            children.append(
                subprocess.Popen(command, env={**env, **_placed(launch), **ours}),
            )
            code = children[-1].wait()
            died_at = time.time()
            said = Path(progress).read_text(encoding="utf-8")
            file.truncate(0)
            if code < 0 and said.startswith(ENDED_WITH):  # killed after its work was done
                return int(said.removeprefix(ENDED_WITH))
            idle = 0 if said else idle + 1
            if code >= 0 or told or -code in stop_signals():
                break
            if idle > 1 or restarts == MOST_RESTARTS:
                break
            restarts += 1
            _say(launch, children[-1].pid, f"{_how(code)}; starting it again")
    if code < 0:
        _end_by(-code)
    return code


def _kept_store(launch: Launch) -> object:
    """Return the store that rank 0 would keep in other runs; None where none is needed."""
    if launch.agent_store or launch.rank:
        return None
    from app.engine.ranks.meeting import keep_store  # loads torch

    assert launch.master is not None, "there are several ranks"
    return keep_store(*launch.master)


def _placed(launch: Launch) -> dict[str, str]:
    """Return torchrun's variables for the child: its place, and a store that outlives it."""
    assert launch.master is not None, "there are several ranks"
    host, port = launch.master
    placed = {
        "RANK": launch.rank,
        "LOCAL_RANK": launch.local_rank,
        "WORLD_SIZE": launch.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        AGENT_STORE: True,
        # NCCL's own watchdog would end a rank when another one has died.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 0,
        # Its monitor would print a trace every second once the store of a generation is gone.
        "TORCH_NCCL_ENABLE_MONITORING": 0,
    }
    if launch.one_host:
        placed["LOCAL_WORLD_SIZE"] = launch.world_size
    return {name: str(value) for name, value in placed.items()}


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}"


def _say(launch: Launch, pid: int, text: str) -> None:
    with suppress(OSError):  # the terminal may be gone
        who = f"rank {launch.rank} (process {pid})"
        print(f"{speaker('train')}: {who} {text}", file=sys.stderr, flush=True)


def _end_by(number: int) -> None:
    """End this process by a signal, without a core dump of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
