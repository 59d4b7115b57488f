"""Detect whether a rank without progress is busy: CPU time of its threads, and compilers."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# Modules on the stack of a thread only during compilation.
COMPILERS = (
    "triton.compiler",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
)
COMPUTING = "computing"
SHARE = 0.02  # of a core; more counts as computing. Low, since on a busy host threads get little
WINDOW = 4  # looks over which the share is measured
AUTOGRAD = "pt_autograd"  # name of torch's threads that run backwards on GPUs
TASKS = Path("/proc/self/task")


@dataclass(slots=True)
class Effort:
    """Recent CPU time of the training thread and of autograd's threads."""

    thread: int  # identifier of the training thread
    _samples: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=WINDOW + 1)
    )  # wall clock and CPU time, seconds

    def look(self) -> str:
        """Return "compiling", "computing", or "" if neither is visible."""
        self._samples.append((time.monotonic(), self._cpu_s()))
        if compiles():
            return "compiling"
        (began, before), (now, cpu) = self._samples[0], self._samples[-1]
        return COMPUTING if cpu - before > SHARE * (now - began) else ""

    def forget(self) -> None:
        """Restart the window, since the rank has made progress."""
        self._samples.clear()

    def _cpu_s(self) -> float:
        if not hasattr(time, "pthread_getcpuclockid"):  # not on every system
            return time.process_time()
        own = time.clock_gettime(time.pthread_getcpuclockid(self.thread))
        return own + sum(_autograd_s())


def _autograd_s() -> Iterator[float]:
    """Yield the CPU seconds of each of autograd's threads."""
    tick = os.sysconf("SC_CLK_TCK")
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with suppress(OSError):  # the thread ended meanwhile
            if (task / "comm").read_text(encoding="utf-8").startswith(AUTOGRAD):
                fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                yield (int(fields[11]) + int(fields[12])) / tick  # in user and in system mode


def compiles() -> bool:
    """Return whether a thread of this process compiles, or waits for a compiler it started."""
    return any(
        str(place.f_globals.get("__name__", "")).startswith(COMPILERS)
        for frame in sys._current_frames().values()
        for place, _ in traceback.walk_stack(frame)
    )
