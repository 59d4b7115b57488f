"""Being told to stop: a signal ends a run after the step that it meets, with a checkpoint and exit
code 75, or 130 for Ctrl-C.

A signal reaches the ranks it was sent to, and so may trouble of one rank's own (`ask`). They agree
on it in the all-reduce at the end of every step, so that all of them stop after the same one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from app.shell import shell_word

STOPPED = os.EX_TEMPFAIL  # exit code 75: ended early, but the same command with resume=auto goes on
# the same for Ctrl-C, as a shell reports it: what runs several commands stops too
INTERRUPTED = 128 + signal.SIGINT
# SIGUSR2 is what submitit has SLURM send.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
HANG_UP = signal.SIGHUP  # the terminal is gone
# signals closer than this are one request: launchers pass on what the ranks have had from elsewhere
REPEAT_S = 3.0
PRESS_S = 1.0  # the same for Ctrl-C, which people press again


def stop_signals() -> tuple[signal.Signals, ...]:
    """All that end a run; not the loss of the terminal where that is ignored, as under nohup."""
    ignored = signal.getsignal(HANG_UP) is signal.SIG_IGN
    return STOP_SIGNALS if ignored else (*STOP_SIGNALS, HANG_UP)


def exit_code(number: int | None) -> int:
    """What a run ends with that this signal has stopped; None: one that another rank had."""
    return INTERRUPTED if number == signal.SIGINT else STOPPED


def hand_on(number: int, handler: Any) -> None:
    """Call whoever listened to a signal before us; to Ctrl-C only this program does."""
    if callable(handler) and number != signal.SIGINT:
        handler(number, None)


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Within the block Ctrl-C waits for its end. OmegaConf looks things up in ways that lose an
    interrupt, or take it for a key that is not there. In the main thread only.
    """
    told: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: told.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)
        if told:
            signal.raise_signal(signal.SIGINT)


class StopRequest:
    """Whether this rank has been told to stop."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._asked = False
        self._first = 0.0  # seconds, monotonic

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take stop signals for the length of the block; outside they end the process at once.

        Processes forked within the block would listen too, instead of ending when they are told to.
        """
        self._before = {number: signal.signal(number, self._take) for number in stop_signals()}
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def ask(self) -> None:
        """Have all ranks stop, though nobody was told to; from any thread."""
        self._asked = True

    @property
    def wanted(self) -> bool:
        """Whether this rank wants all of them to stop."""
        return self._asked or self.signal is not None

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == HANG_UP and self.signal is not None:
            return  # a terminal that is closed afterwards asks for nothing more
        now = time.monotonic()
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._first = now
        elif now - self._first > (PRESS_S if number == signal.SIGINT else REPEAT_S):
            os._exit(exit_code(number))  # told again: at once

    def hand_on(self) -> None:
        """Call whoever took the signal before: submitit's handler puts its job into the queue."""
        if self.signal:
            hand_on(self.signal, self._before[self.signal])

    def farewell(self, step: int, saved: Path | None, *, command: str) -> str:
        """Return in one line what happened, and the command that continues the run, which begins
        with `command`.
        """
        by = self.signal.name if self.signal else "a signal to another rank"
        by = "Ctrl-C" if self.signal is signal.SIGINT else by
        if saved is None:
            return (
                f"train.py: stopped by {by} after step {step}; nothing was saved "
                "(checkpoint.interval=0)"
            )
        resume = shell_word("resume", str(saved.parent.parent))
        return (
            f"train.py: stopped by {by} after step {step}, saved {saved}; "
            f"to continue: {command} {resume}"
        )
