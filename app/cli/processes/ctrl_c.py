"""Ctrl-C while a program imports and composes: a line instead of a stack trace. Imports little
itself.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def stop_quietly(program: str, speak: bool = True) -> None:
    """End this program on Ctrl-C, with one line where it is to `speak`, until `interrupt_again`
    or another handler.

    At once and without an exception, which argparse, Hydra and OmegaConf lose or take for a mistake
    where it meets them at work.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if speak:
            os.write(2, f"\n{program}: stopped\n".encode())
        os._exit(128 + number)

    signal.signal(signal.SIGINT, stop)


def interrupt_again() -> None:
    """Raise KeyboardInterrupt on Ctrl-C, as Python does: what begins now has to be ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
