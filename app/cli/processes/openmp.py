"""How long OpenMP's threads spin for work before they sleep, which torch reads when it is loaded.

Longer than what lies between two operations, shorter than a scheduler's turn: with libgomp's own
300,000 rounds they take the cores from other programs, and from each other. Where others wait for
the cores already, half as long. Measured by bench/busy.py. Linux counts programs and cores of the
whole host: who shares a few of its cores with others, in a container, is not seen as crowded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

SPINS, SPINS_IN_A_CROWD = 2_000, 1_000
LOOKS, BETWEEN_S = 3, 0.01  # so that a program that only woke up for a moment is no crowd
LOAD = Path("/proc/loadavg")


def waiting_threads(env: Mapping[str, str]) -> dict[str, str]:
    """The variable that says it; none where the user does.

    It changes how fast a run is, not what it computes: the number of threads stays the user's or
    torch's.
    """
    if env.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return {}
    return {"GOMP_SPINCOUNT": str(SPINS_IN_A_CROWD if crowded() else SPINS)}


def crowded(load: Path = LOAD) -> bool:
    """Whether programs besides this one want as many cores as this host has, or more."""
    return all(_others(load, wait=look > 0) >= (os.cpu_count() or 1) for look in range(LOOKS))


def _others(load: Path, wait: bool) -> int:
    """Threads on a core or waiting for one, without this one; 0 where Linux does not tell."""
    time.sleep(BETWEEN_S * wait)
    try:
        words = load.read_text(encoding="utf-8").split()  # 0.20 0.18 0.12 1/80 11206: proc(5)
        running, _ = words[3].split("/")
        return int(running) - 1
    except (OSError, ValueError, IndexError):
        return 0
