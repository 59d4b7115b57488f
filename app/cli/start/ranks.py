"""Ranks of this host as further processes, under torchrun."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from app.cli.processes.environment import threads_of
from app.cli.processes.home import child_paths
from app.cli.processes.launcher import STARTED_AS, started_as
from app.cli.processes.parent import bound
from app.engine.files.signals import STOPPED, hand_on, handled, stop_signals


def start_ranks(
    world_size: int, script: str, overrides: Sequence[str], env: Mapping[str, str]
) -> int:
    """Run `script` as `world_size` ranks of this host under torchrun and return the exit code of
    the first rank to fail.
    """
    command, settings = ranks_command(world_size, script, overrides, env=env)
    return wait_for_ranks(subprocess.Popen(command, env=settings))


def ranks_command(
    world_size: int, script: str, overrides: Sequence[str], *, env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment that run `script` as ranks of this host."""
    torchrun = [sys.executable, "-m", "app.cli.torchrun", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world_size}", script, *overrides]
    typed_as = {STARTED_AS: started_as(sys.argv[0])}
    threads = {"OMP_NUM_THREADS": str(threads_of(world_size, env))}
    settings = {**threads, **typed_as, **env, **child_paths(env)}
    return bound(command), settings


def wait_for_ranks(process: subprocess.Popen[Any]) -> int:
    """Return the exit code of the first rank to fail.

    This process passes signals on and waits, so that no rank is left behind; if it is killed, the
    ranks die with it.
    """
    told: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        told.append(signal.Signals(number))
        process.send_signal(number)

    with handled(stop_signals(), pass_on) as before:
        code = process.wait()
    code = code if code >= 0 else 128 - code
    if told and code in (STOPPED, 128 + told[0]):  # the latter: before there were ranks
        hand_on(told[0], before[told[0]])
    return code
