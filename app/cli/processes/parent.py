"""Processes that end with the one that started them, however that has ended.

A killed launcher cannot tell its ranks: Linux does, for those that have asked for it (prctl(2),
PR_SET_PDEATHSIG), also once they have become another program. Programs that a person starts stay
as they are; they may be meant to outlive a shell.

    python app/cli/processes/parent.py 1234 /usr/bin/python3 train.py …     as a child of process
    1234
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> list[str]:
    """The command with which this process starts a program by path that is to end with it."""
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Have this process killed when its starter, process `parent`, dies or has died.

    What has been committed stays, as after any kill; nothing is saved.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had died before
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
