"""Processes that end with their parent, however that has ended.

A launcher that is killed cannot end its ranks. Linux does it for processes that have asked for it
(prctl(2), PR_SET_PDEATHSIG), and the request survives exec. Programs started by a person do not
ask: they may be meant to outlive a shell.

As a child of process 1234:

    python app/cli/processes/parent.py 1234 /usr/bin/python3 train.py …
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def bound(command: Sequence[str]) -> list[str]:
    """Return the command that starts a program, given by its path, as a child that ends with this
    process.
    """
    return [sys.executable, "-P", __file__, str(os.getpid()), *command]


def end_with_parent(parent: int) -> None:
    """Have this process killed when process `parent`, which started it, dies or has died.

    Complete checkpoints stay; no new one is saved.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl: no signal will come
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
