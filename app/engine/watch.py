"""Names a rank that is stuck: which action, and whom it waits for.

A thread beside the training looks at what the rank does and since when. Every rank that has done the same thing for too
long says so and ends with EXIT_STUCK, a little later, so that the others can say theirs.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

EXIT_STUCK = 124  # as `timeout` reports it
LOOKS = 20  # per timeout
GRACE = 0.5  # of a timeout: from saying so to the end


@dataclass(slots=True)
class Watch:
    """What this rank does, as told by itself."""

    rank: int  # global rank
    timeout_s: float  # seconds in one action before it counts as stuck
    unfinished: Callable[[], str] = str  # what is under way to and from other ranks, in words
    doing: str = ""
    since: float = math.inf  # on the monotonic clock; inf: resting, nothing can be stuck

    def note(self, doing: str) -> None:
        """From now on the rank does this."""
        self.doing, self.since = doing, time.monotonic()

    def rest(self) -> None:
        """From now on the rank does what may take any time."""
        self.since = math.inf

    def verdict(self) -> str | None:
        """What to say when the rank is stuck, otherwise None."""
        seconds = time.monotonic() - self.since
        if seconds <= self.timeout_s:
            return None
        under_way = self.unfinished()
        whom = f"; under way: {under_way}" if under_way else ""
        return f"rank {self.rank} is stuck in {self.doing} for {seconds:.0f} s (schedule.timeout_s={self.timeout_s:g}){whom}"

    @contextmanager
    def running(self, end: Callable[[int], object] = os._exit) -> Iterator[None]:
        """Look at the rank from another thread; `end` is called with EXIT_STUCK when it is stuck."""
        over = threading.Event()
        thread = threading.Thread(target=self._look, args=(over, end), daemon=True, name="watch")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, over: threading.Event, end: Callable[[int], object]) -> None:
        while not over.wait(self.timeout_s / LOOKS):
            if words := self.verdict():
                print(words, file=sys.stderr, flush=True)
                if not over.wait(self.timeout_s * GRACE):
                    end(EXIT_STUCK)
                return
