"""Measure start-up by part, from the start of the process or the call to the first step."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/self/stat")
START_TIME = 22  # its field (from 1): start of the process in clock ticks since boot


class StartTimes:
    """Seconds of each part of start-up; the first part ends when this object is created."""

    def __init__(self, began: float | None = None) -> None:
        """`began` is the monotonic time of the call that trains; None: this process only trains."""
        age = process_age_s() if began is None else time.monotonic() - began
        self._parts = {} if age is None else {"imports and plan": age}
        self._since = time.monotonic()

    def end(self, part: str) -> None:
        """Add the time since the last call to `part`."""
        before = self._since
        self._since = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + self._since - before

    def __str__(self) -> str:
        """Return the total and the seconds of each part, as text."""
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._parts.items())
        return f"ready after {sum(self._parts.values()):.2f} s: {parts}"


def process_age_s() -> float | None:
    """Return the seconds since this process began; None outside Linux.

    Source: proc_pid_stat(5).
    """
    if not STAT.exists():
        return None
    line = STAT.read_text(encoding="utf-8", errors="replace")
    after_name = line.rpartition(")")[2].split()  # begins with field 3
    ticks = int(after_name[START_TIME - 3])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
