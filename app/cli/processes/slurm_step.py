"""End the programs of a SLURM step with slurmstepd, the daemon that started them on this host.

If slurmstepd is killed, its processes continue and SLURM no longer knows them. SLURM handles the
other cases itself: when srun is killed, its second process ends the step, and the end of a batch
script ends its job.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

DAEMON = "slurmstepd"
POLL_S = 0.5  # seconds between checks that the daemon lives


@dataclass(frozen=True, slots=True)
class Process:
    """A running process of this host."""

    pid: int
    began: int  # start time, clock ticks since boot: tells a reused pid from the original process
    name: str = field(compare=False)
    parent: int = field(compare=False)


def end_with_daemon() -> None:
    """Have this process killed when slurmstepd, its parent or a further ancestor, ends.

    A parent-death signal is not enough, since a shell may be between the two.
    """
    try:
        daemon = _process(os.getppid())
        while daemon is not None and daemon.name != DAEMON:
            daemon = _process(daemon.parent)
    except OSError:  # /proc may hide processes of other users
        return
    if daemon is not None:
        threading.Thread(target=_end_after, args=(daemon,), daemon=True, name=DAEMON).start()


def _end_after(process: Process) -> None:
    while _lives(process):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _lives(process: Process) -> bool:
    """Return whether the process still runs; True if /proc cannot be read, for example because this
    process has no file handle left.
    """
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
