"""Environment variables of the programs that use a trained model; train.py handles its own.

torchrun or SLURM start the ranks of these programs too, and set rank and world size there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from app.cli.processes.launcher import Launch

# Rounds that idle OpenMP threads wait for work before they sleep: enough to bridge the gap between
# two operations, and less than a time slice of the scheduler. With libgomp's default of 300,000
# they take cores from other programs and from each other (bench/busy.py).
SPINS = 2_000


def environment() -> MutableMapping[str, str]:
    """Return the environment of this process, to read and to pass to children."""
    return os.environ


def joined_launch(parent: int) -> Launch:
    """Return the place of this process among its launcher's; make it end with process `parent`, and
    set the variables that torch, gloo and NCCL read. Raises ConfigError.
    """
    launch = Launch.from_environment(os.environ)
    launch.end_with_launcher(parent)
    for name, value in {**launch.network(), **waiting_threads(os.environ)}.items():
        os.environ.setdefault(name, value)
    return launch


def waiting_threads(env: Mapping[str, str]) -> dict[str, str]:
    """Return GOMP_SPINCOUNT, or nothing if the user has set it or OMP_WAIT_POLICY.

    torch reads it when it is loaded. It changes speed, not results: the number of threads stays.
    """
    if env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return {}
    return {"GOMP_SPINCOUNT": str(SPINS)}
