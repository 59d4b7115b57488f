"""Stop a run on a signal: after the current step, with a checkpoint and exit code 75 (Ctrl-C: 130).

A signal may reach only some ranks, and a rank may ask for a stop itself (`ask`). The all-reduce at
the end of every step shares the request, so that all ranks stop after the same step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from app.shell import shell_word

STOPPED = os.EX_TEMPFAIL  # exit code 75: ended early; the command with resume=auto resumes
# for Ctrl-C, as shells report it, so that a script of several commands stops too
INTERRUPTED = 128 + signal.SIGINT
# submitit makes SLURM send SIGUSR2.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
HANG_UP = signal.SIGHUP  # the terminal was closed
# signals within this time are one request: launchers forward signals that ranks already got
REPEAT_S = 3.0
PRESS_S = 1.0  # the same for Ctrl-C; a user who presses it again wants an exit at once


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that stop a run; without SIGHUP if that is ignored, as under nohup."""
    ignored = signal.getsignal(HANG_UP) is signal.SIG_IGN
    return STOP_SIGNALS if ignored else (*STOP_SIGNALS, HANG_UP)


def exit_code(number: int | None) -> int:
    """Return the exit code of a run stopped by this signal; None: a signal to another rank."""
    return INTERRUPTED if number == signal.SIGINT else STOPPED


@contextmanager
def handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[Mapping[signal.Signals, Any]]:
    """Handle signals within the block; yields the handlers before it, which are back after it.

    Only the main thread gets signals: in another one nothing is handled, and the mapping is empty.
    """
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers} if ours else {}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier or signal.SIG_DFL)


def hand_on(number: int, handler: Any) -> None:
    """Call the previous handler of a signal, except for Ctrl-C, which only this program handles."""
    if callable(handler) and number != signal.SIGINT:
        handler(number, None)


@contextmanager
def ctrl_c_held_back() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block.

    OmegaConf's lookups swallow KeyboardInterrupt, or take it for a missing key.
    """
    told: list[int] = []
    try:
        with handled([signal.SIGINT], lambda number, frame: told.append(number)):
            yield
    finally:
        if told:
            signal.raise_signal(signal.SIGINT)


class StopRequest:
    """Request to stop, by a signal to this rank or by the rank itself."""

    def __init__(self) -> None:
        self.wanted = False  # True if this rank wants all ranks to stop
        self.signal: signal.Signals | None = None
        self._first = 0.0  # seconds, monotonic
        self._before: Mapping[signal.Signals, Any] = {}

    @contextmanager
    def listening(self, end: Callable[[int], object] = os._exit) -> Iterator[None]:
        """Handle stop signals within the block; outside they end the process at once. A second
        request calls `end` with the exit code.

        Do not fork within the block: children would inherit the handlers, and not end on a signal.
        """
        self._end = end
        with handled(stop_signals(), self._take) as self._before:
            yield

    def ask(self) -> None:
        """Ask all ranks to stop without a signal. Thread-safe."""
        self.wanted = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        if number == HANG_UP and self.signal is not None:
            return  # closing the terminal after a stop signal is no second request
        now = time.monotonic()
        if self.signal is None:
            self.wanted = True
            self.signal = signal.Signals(number)
            self._first = now
        elif now - self._first > (PRESS_S if number == signal.SIGINT else REPEAT_S):
            self._end(exit_code(number))  # second request: exit at once

    def hand_on(self) -> None:
        """Call the previous handler of the signal: submitit's requeues its job."""
        if self.signal:
            hand_on(self.signal, self._before.get(self.signal))

    def farewell(self, step: int, saved: Path | None, command: str) -> str:
        """Return one line on the stop, with the command that resumes the run.

        `command` is that command without overrides.
        """
        by = self.signal.name if self.signal else "a signal to another rank"
        by = "Ctrl-C" if self.signal is signal.SIGINT else by
        if saved is None:
            return f"stopped by {by} after step {step}; nothing was saved (checkpoint.interval=0)"
        resume = shell_word("resume", str(saved.parent.parent))
        return f"stopped by {by} after step {step}, saved {saved}; to continue: {command} {resume}"
