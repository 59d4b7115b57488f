"""Processes of a run: what the launcher said, and starting the ranks of this host when nobody did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.errors import ConfigError

CPU_RANKS_PER_CORE = 4  # more gloo processes than that only wait for each other


@dataclass(frozen=True, slots=True)
class Launch:
    """Place of this process among those that torchrun or SLURM started."""

    rank: int  # global rank
    local_rank: int  # rank on this host
    world_size: int | None  # processes in all; None: started by hand, alone

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Launch:
        """Read RANK, LOCAL_RANK and WORLD_SIZE as torchrun sets them."""
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return cls(0, 0, None)
        return cls(int(env["RANK"]), int(env.get("LOCAL_RANK", 0)), int(env["WORLD_SIZE"]))


def check_room(world_size: int, gpus: int) -> None:
    """Raise ConfigError when this host is too small for so many ranks; `gpus` is how many they may use, 0 for CPU."""
    most = gpus or CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if world_size > most:
        what = "GPUs" if gpus else "processes on its cores"
        rule = f"this host has room for {most} {what}; torchrun joins several hosts"
        raise ConfigError("parallel.dp", world_size, rule, most)


def start_ranks(world_size: int, script: str, overrides: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `script` as `world_size` ranks of this host under torchrun and return its exit code.

    Being told to end, this process passes it on and waits, so that no rank is left behind.
    """
    threads = str(max(1, (os.cpu_count() or 1) // world_size))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    process = subprocess.Popen([*torchrun, script, *overrides], env={"OMP_NUM_THREADS": threads, **env})
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the ranks' launcher as well
    return process.wait()
