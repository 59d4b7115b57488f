"""Ctrl-C outside the steps of a run: a line instead of a stack trace. Imports little itself."""

from __future__ import annotations

import os
import signal
from types import FrameType

GRACE_S = 10.0  # seconds that an interrupted program has to tidy up


def stop_quietly(program: str, speak: bool = True) -> None:
    """End this program on Ctrl-C, with one line where it is to `speak`, until `interrupt_again`
    or another handler.

    At once and without an exception, which argparse, Hydra and OmegaConf lose or take for a mistake
    where it meets them at work.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _end(f"{program}: stopped" if speak else "")

    signal.signal(signal.SIGINT, stop)


def interrupt_then_end(said: str) -> None:
    """Raise KeyboardInterrupt on Ctrl-C, and end this program with the line `said` where it is
    still there GRACE_S seconds later, or when Ctrl-C is pressed again: the exception may be lost on
    its way, and `threading` may wait for ever for a lock that it met.

    A process that waits inside of C, for other ranks, hears of neither before that returns.
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
    """Raise KeyboardInterrupt on Ctrl-C, as Python does: what begins now has to be ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
