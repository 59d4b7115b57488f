"""What each thread of a rank does, as told by itself, and for how long it has told nothing new."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from app.engine.watchdog.collectives import Collective


@dataclass(slots=True)
class ThreadActivity:
    """What one thread of this rank does, as told by itself."""

    doing: str = ""
    since: float = math.inf  # on the monotonic clock; inf: resting
    began: float = 0.0  # the same by the wall clock
    moves: int = 0  # notes so far
    meeting: int = 0  # of all ranks, outside of collectives, from 1; 0: it is in none

    # Other threads read these one by one: a new time beside old words does no harm, but an old
    # time beside new words would.
    def note(self, doing: str, meeting: int = 0) -> None:
        """From now on the thread does this."""
        self.since = time.monotonic()
        self.began = time.time()
        self.doing = doing
        self.meeting = meeting
        self.moves += 1

    def rest(self, doing: str = "") -> None:
        """From now on it does what may take any time, until it enters a collective."""
        self.began = time.time()
        self.doing = doing
        self.since = math.inf
        self.moves += 1

    def rests(self, under_way: Iterable[Collective]) -> bool:
        """Whether it does, and has entered none since: those of before go on beside it."""
        return self.since == math.inf and all(each.since < self.began for each in under_way)


@dataclass(slots=True)
class Quiet:
    """For how long a thread has come to nothing new, in looks.

    A process that is stopped does not look, and one on a busy host looks less often: so neither
    counts as quiet for longer than it ran.
    """

    moves: int = 0  # how often it had come to something new
    looks: int = 0

    def look(self, moves: int) -> None:
        """Count one more look."""
        self.looks = self.looks + 1 if moves == self.moves else 0
        self.moves = moves
