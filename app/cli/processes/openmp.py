"""Spin count of OpenMP threads: how long they wait for work before they sleep (GOMP_SPINCOUNT).

Long enough to bridge the gap between two operations, shorter than a time slice of the scheduler:
with libgomp's default of 300,000 rounds idle threads take cores from other programs and from each
other. Half as long if other programs already wait for cores. Measured by bench/busy.py.

Limitation: Linux reports load and cores of the whole host, so a container that shares a few cores
is not recognised as crowded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

SPINS, SPINS_IN_A_CROWD = 2_000, 1_000
LOOKS, BETWEEN_S = 3, 0.01  # samples of the load: a program that woke up for a moment is no crowd
LOAD = Path("/proc/loadavg")


def waiting_threads(env: Mapping[str, str]) -> dict[str, str]:
    """Return GOMP_SPINCOUNT, or nothing if the user has set it or OMP_WAIT_POLICY.

    torch reads it when it is loaded. It changes speed, not results: the number of threads stays.
    """
    if env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return {}
    return {"GOMP_SPINCOUNT": str(SPINS_IN_A_CROWD if crowded() else SPINS)}


def crowded(load: Path = LOAD) -> bool:
    """Return whether other programs want at least as many cores as this host has."""
    return all(_others(load, wait=look > 0) >= (os.cpu_count() or 1) for look in range(LOOKS))


def _others(load: Path, wait: bool) -> int:
    """Return the number of other threads that run or wait for a core; 0 if it is not known."""
    time.sleep(BETWEEN_S * wait)
    try:
        words = load.read_text(encoding="utf-8").split()  # 0.20 0.18 0.12 1/80 11206: proc(5)
        running, _ = words[3].split("/")
        return int(running) - 1
    except (OSError, ValueError, IndexError):
        return 0
