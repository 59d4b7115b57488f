"""How long a start takes, by part: from the beginning of the process to its first step."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/self/stat")
START_TIME = 22  # field of it, from 1: when the process began, clock ticks since the host did


class StartTimes:
    """Seconds of the parts of a start; the first one is what lies before this was made."""

    def __init__(self) -> None:
        age = process_age_s()
        self._parts = {} if age is None else {"imports and plan": age}
        self._since = time.monotonic()

    def end(self, part: str) -> None:
        """What has gone on since the part before was this one, or more of it."""
        before = self._since
        self._since = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + self._since - before

    def __str__(self) -> str:
        """All seconds and those of each part, as text."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts.items())
        return f"ready after {sum(self._parts.values()):.2f} s: {parts}"


def process_age_s() -> float | None:
    """Seconds since this process began; None where the system does not tell, as Linux does.

    Source: proc_pid_stat(5).
    """
    if not STAT.exists():
        return None
    line = STAT.read_text(encoding="utf-8", errors="replace")
    behind_name = line.rpartition(")")[2].split()  # begins with field 3
    ticks = int(behind_name[START_TIME - 3])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
