"""Warn of hangs long before they end the run, and report when they are over."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.engine.watchdog.missing import CollectiveWait


@dataclass(slots=True)
class Alarms:
    """Operations that this rank has reported as hanging."""

    rank: int
    timeout_s: float
    look_s: float
    _told: dict[str, float] = field(default_factory=dict)  # name -> wall clock at which it began

    def warn(self, wait: CollectiveWait, words: str) -> None:
        """Print, once per wait, that the operation hangs so far, and why."""
        if wait.name in self._told:
            return
        self._told[wait.name] = time.time() - wait.seconds
        under_way = wait.under_way and f"; under way: {wait.under_way}"
        self._print(
            f"rank {self.rank} has waited {wait.seconds:.0f} s in {wait}{under_way}; {words}; "
            f"if that lasts, the run ends (schedule.timeout_s={self.timeout_s:g})"
        )

    def resolve(self, waits: Sequence[CollectiveWait]) -> None:
        """Print that a reported operation continued, unless it is still among the `waits`."""
        now = time.time()
        for name, began in self._told.copy().items():
            same = (wait for wait in waits if wait.name == name)
            if all(now - wait.seconds > began + self.look_s for wait in same):
                del self._told[name]
                self._print(f"rank {self.rank}: {name} continued after {now - began:.0f} s")

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
