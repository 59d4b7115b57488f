"""Whether a rank that stays in one place works there: CPU time of its threads, and compilers."""

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

# Modules that are on the stack of a thread only while something is compiled.
COMPILERS = (
    "triton.compiler",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch.utils.cpp_extension",
)
COMPUTING = "computing"
SHARE = 0.02  # of one core, above which a thread counts as computing; on a busy host it gets little
WINDOW = 4  # looks over which that share is taken
AUTOGRAD = "pt_autograd"  # what torch calls its threads that run backwards on GPUs
TASKS = Path("/proc/self/task")


@dataclass(slots=True)
class Effort:
    """What the training thread of this process, and those of autograd, have worked lately."""

    thread: int  # identifier of the training thread
    _samples: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=WINDOW + 1)
    )  # wall clock and CPU time, seconds

    def look(self) -> str:
        """What the rank does, "compiling" or "computing"; empty: neither, as far as can be seen."""
        self._samples.append((time.monotonic(), self._cpu_s()))
        if compiles():
            return "compiling"
        (began, before), (now, cpu) = self._samples[0], self._samples[-1]
        return COMPUTING if cpu - before > SHARE * (now - began) else ""

    def forget(self) -> None:
        """Start anew: the rank has come to another place."""
        self._samples.clear()

    def _cpu_s(self) -> float:
        if not hasattr(time, "pthread_getcpuclockid"):  # not on every system
            return time.process_time()
        own = time.clock_gettime(time.pthread_getcpuclockid(self.thread))
        return own + sum(_autograd_s())


def _autograd_s() -> Iterator[float]:
    """CPU seconds of each thread in which autograd runs backwards."""
    tick = os.sysconf("SC_CLK_TCK")
    for task in TASKS.iterdir() if TASKS.is_dir() else ():
        with suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text(encoding="utf-8").startswith(AUTOGRAD):
                fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                yield (int(fields[11]) + int(fields[12])) / tick  # in user and in system mode


def compiles() -> bool:
    """Whether a thread of this process is within a compiler, or waits for one that it started."""
    return any(
        str(place.f_globals.get("__name__", "")).startswith(COMPILERS)
        for frame in sys._current_frames().values()
        for place, _ in traceback.walk_stack(frame)
    )
