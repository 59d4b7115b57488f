"""Ctrl-C outside the steps of a run: one line instead of a stack trace.

Imports little, because programs install these handlers before their slow imports.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from app.programs import speaker

GRACE_S = 10.0  # seconds that an interrupted program has to clean up


def stop_quietly(program: str, speak: bool = True) -> None:
    """End this program at once on Ctrl-C, with one line if it is to `speak`, until
    `interrupt_again` or another handler is installed.

    Raises no KeyboardInterrupt, because argparse, Hydra and OmegaConf swallow it or report it as a
    mistake of the user.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _end(f"{speaker(program)}: stopped" if speak else "")

    signal.signal(signal.SIGINT, stop)


def interrupt_then_end(said: str) -> None:
    """Raise KeyboardInterrupt on Ctrl-C; if the program still runs GRACE_S seconds later, or at a
    second Ctrl-C, end it with the line `said`.

    The exception alone is not enough: a library may swallow it, and `threading` may wait forever
    for a lock that it left taken. Python runs neither handler while the process waits in C code,
    for example in a collective.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _end(said)

    def interrupt(number: int, frame: FrameType | None) -> None:
        for again in (signal.SIGINT, signal.SIGALRM):
            signal.signal(again, stop)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def _end(said: str) -> None:
    if said:
        os.write(2, f"\n{said}\n".encode())
    os._exit(128 + signal.SIGINT)


def interrupt_again() -> None:
    """Raise KeyboardInterrupt on Ctrl-C, as Python does: the work that begins now needs cleanup."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
