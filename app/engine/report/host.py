"""Measure how much of the host's cores a run gets, from /proc; readings at log intervals only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
AUTOGRAD = "pt_autograd"  # name of torch's threads that run backwards on GPUs
BUSY = (0, 1, 2, 5, 6, 7)  # columns of /proc/stat: user, nice, system, irq, softirq, steal


@dataclass(frozen=True, slots=True)
class HostReading:
    """Sums since the host and the process began, seconds; None where /proc does not say."""

    at: float  # monotonic clock
    own: float  # CPU time of this process
    busy: float | None  # CPU time of all cores, all processes
    # time in which the training thread could run and had no core, autograd's threads included
    delayed: float | None


def read_host(proc: Path = PROC, thread: int | None = None) -> HostReading:
    """Read the sums now; `thread`: native identifier of the training thread, None for this one."""
    return HostReading(
        time.monotonic(),
        time.process_time(),
        busy=_busy(proc),
        delayed=_delayed(proc, threading.get_native_id() if thread is None else thread),
    )


def _busy(proc: Path) -> float | None:
    with suppress(OSError, ValueError, IndexError):
        first = (proc / "stat").read_text(encoding="utf-8").partition("\n")[0].split()
        if first[0] == "cpu":
            ticks = [int(each) for each in first[1:]]
            return sum(ticks[column] for column in BUSY) / os.sysconf("SC_CLK_TCK")
    return None


def _delayed(proc: Path, thread: int) -> float | None:
    tasks = proc / "self" / "task"
    found = _run_delay(tasks / str(thread))
    if found is None:
        return None
    return found + sum(_autograd(tasks, thread))


def _autograd(tasks: Path, thread: int) -> Iterator[float]:
    for task in tasks.iterdir():
        with suppress(OSError):  # the thread ended meanwhile
            name = (task / "comm").read_text(encoding="utf-8")
            if task.name != str(thread) and name.startswith(AUTOGRAD):
                yield _run_delay(task) or 0.0


def _run_delay(task: Path) -> float | None:
    """Return seconds on a run queue, the second number of schedstat (Linux, Documentation/
    scheduler/sched-stats.rst).
    """
    with suppress(OSError, ValueError, IndexError):
        return int((task / "schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    return None


class HostMeter:
    """Shares of the host's cores between two readings."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._before = read_host(proc)

    def lap(self) -> tuple[float | None, float, float | None]:
        """Return since the last lap: seconds that the training thread waited for a core, and mean
        cores busy with this process and with all processes; None where /proc does not say.
        """
        now, before = read_host(self._proc), self._before
        self._before = now
        seconds = max(now.at - before.at, 1e-9)
        waited = _more(now.delayed, before.delayed)
        busy = _more(now.busy, before.busy)
        cores = None if busy is None else busy / seconds
        return waited, (now.own - before.own) / seconds, cores


def _more(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else max(0.0, now - before)
