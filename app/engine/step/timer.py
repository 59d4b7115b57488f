"""Time parts of a step: launches, reading of the next batches, the host's wait for the device."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Clock of one step after the other; on a GPU with two events, which the host never waits for.

    Call `begin`, `launched`, `has_read` and `finished` in this order; `finished` after the host has
    waited for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
        self._at = [0.0] * 4

    def begin(self) -> None:
        """Note that the step begins."""
        self._at[0] = time.perf_counter()

    def launched(self) -> None:
        """Note that all work of the step is launched; on a CPU it is done."""
        self._at[1] = time.perf_counter()
        if self._events:
            self._events[0].record()

    def has_read(self) -> None:
        """Note that the next batches are read."""
        self._at[2] = time.perf_counter()
        if self._events:
            self._events[1].record()

    def finished(self) -> None:
        """Note that the host has waited for the device."""
        self._at[3] = time.perf_counter()

    @property
    def data_wait_ms(self) -> float:
        """Time in which the device waited for the next batches to be read."""
        if self._events is None:
            return 1e3 * (self._at[2] - self._at[1])
        # the second event lies behind the first on the device unless that has run out of work
        return float(self._events[0].elapsed_time(self._events[1]))

    @property
    def launch_ms(self) -> float | None:
        """Time of the host for launches; None on a CPU."""
        return 1e3 * (self._at[1] - self._at[0]) if self._events else None

    @property
    def device_wait_ms(self) -> float | None:
        """Time in which the host waited for the device; None on a CPU."""
        return 1e3 * (self._at[3] - self._at[2]) if self._events else None
