"""Ctrl-C before the steps of a run: a line instead of a stack trace. Imports little itself."""

from __future__ import annotations

import os
import signal
from types import FrameType

GRACE_S = 10.0  # seconds that an interrupted start has to tidy up


def stop_quietly(program: str, speak: bool = True) -> None:
    """End this program on Ctrl-C, with one line where it is to `speak`, until `interrupt_again`
    or another handler.

    At once and without an exception, which argparse, Hydra and OmegaConf lose or take for a mistake
    where it meets them at work.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _end(f"{program}: stopped" if speak else "")

    signal.signal(signal.SIGINT, stop)


def interrupt_for_a_while(said: str) -> None:
    """Raise KeyboardInterrupt on Ctrl-C, and end this program GRACE_S seconds later in any case,
    with the line `said`: callbacks from C lose the exception, and `threading` may wait for ever
    for a lock that it met.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        _end(said)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not any(signal.getitimer(signal.ITIMER_REAL)):
            signal.signal(signal.SIGALRM, stop)
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
