"""Programs of a SLURM step end with slurmstepd, the daemon that has started them on this host.

SLURM lets the processes of a daemon that was killed go on, and no longer knows of them. Whoever
else keeps a step it looks after itself: srun has a second process that ends the step when the
first is killed, and the end of a batch script ends its job.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

DAEMON = "slurmstepd"
POLL_S = 0.5  # seconds between looks at it


@dataclass(frozen=True, slots=True)
class Process:
    """A process of this host that has not ended."""

    pid: int
    began: int  # clock ticks since the host was started: ids are used again
    name: str = field(compare=False)
    parent: int = field(compare=False)


def end_with_daemon() -> None:
    """Have this process killed when the daemon that has started it, or a process above it, ends.

    A parent-death signal would not do: a shell may be between the two.
    """
    try:
        daemon = _process(os.getppid())
        while daemon is not None and daemon.name != DAEMON:
            daemon = _process(daemon.parent)
    except OSError:  # processes of others may be hidden
        return
    if daemon is not None:
        threading.Thread(target=_end_after, args=(daemon,), daemon=True, name=DAEMON).start()


def _end_after(process: Process) -> None:
    while _lives(process):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: Process) -> bool:
    """Whether it still runs, as far as can be told: this process may have no file handle left."""
    try:
        return _process(process.pid) == process
    except OSError:
        return True


def _process(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    before, _, after = text.rpartition(")")
    state, parent, *fields = after.split()
    if state in "ZX":  # has ended
        return None
    return Process(pid, int(fields[17]), name=before.partition("(")[2], parent=int(parent))
