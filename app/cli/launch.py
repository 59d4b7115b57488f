"""Processes of a run: what the launcher said, and starting the ranks of this host when nobody did."""

from __future__ import annotations

import os
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
        world = int(env["WORLD_SIZE"]) if "WORLD_SIZE" in env and "RANK" in env else None
        return cls(int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), world)


def start_ranks(world_size: int, gpus: int, script: str, overrides: Sequence[str]) -> int:
    """Run `script` as `world_size` ranks of this host under torchrun and return its exit code.

    `gpus` is the number of GPUs the ranks may use, 0 for CPU. Raises ConfigError when the host is too small.
    """
    most = gpus or CPU_RANKS_PER_CORE * (os.cpu_count() or 1)
    if world_size > most:
        what = "GPUs" if gpus else "processes on its cores"
        raise ConfigError(
            "parallel.dp", world_size, f"this host has room for {most} {what}; start more hosts with torchrun", most
        )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    return subprocess.call([*torchrun, script, *overrides])
