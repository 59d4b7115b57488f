"""Thread activity: what each thread of a rank says it does, and since when."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from app.engine.watchdog.collectives import Collective


@dataclass(slots=True)
class ThreadActivity:
    """Activity of one thread of this rank, noted by that thread."""

    doing: str = ""
    since: float = math.inf  # monotonic clock; inf while resting
    began: float = 0.0  # the same by the wall clock
    moves: int = 0  # notes so far
    meeting: int = 0  # number, from 1, of a rendezvous of all ranks outside collectives; 0: none

    # Order matters, since other threads read the fields one by one: a new time with old words is
    # harmless, an old time with new words looks like a hang.
    def note(self, doing: str, meeting: int = 0) -> None:
        """Note what the thread does from now on."""
        self.since = time.monotonic()
        self.began = time.time()
        self.doing = doing
        self.meeting = meeting
        self.moves += 1

    def rest(self, doing: str = "") -> None:
        """Note work that may take any time, until the thread enters a collective."""
        self.began = time.time()
        self.doing = doing
        self.since = math.inf
        self.moves += 1

    def rests(self, under_way: Iterable[Collective]) -> bool:
        """True if it rests and entered no collective since; earlier ones may still be under way."""
        return self.since == math.inf and all(each.since < self.began for each in under_way)


@dataclass(slots=True)
class Quiet:
    """Number of looks of the watchdog during which a thread noted nothing new.

    A stopped process does not look, and one on a busy host looks less often: so neither counts as
    quiet for longer than it ran.
    """

    moves: int = 0  # notes of the thread at the last look
    looks: int = 0

    def look(self, moves: int) -> None:
        """Count one more look."""
        self.looks = self.looks + 1 if moves == self.moves else 0
        self.moves = moves
