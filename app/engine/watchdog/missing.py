"""Find the ranks missing in an operation, and decide whether waiting for them is justified."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from app.engine.watchdog.collectives import Collective
from app.engine.watchdog.heartbeats import Doing, Finding, Heartbeats, Record, Seen
from app.plan.groups import CHECKPOINT

# share of a timeout in one operation after which a rank is stuck, unless the wait is justified
SAYS = 0.9
SILENT = 0.3  # share of a timeout without a heartbeat after which a rank counts as gone
# Looks in one operation, of 2 s each by default, so that a hang is reported within 30 s.
ASKS, WARNS = 4, 10  # until a rank examines the others; until it warns of those that hang
MUTE = 5  # looks at a rank without a heartbeat after which it counts as hanging
SHOWN = 4  # maximum of missing ranks described, and of sends and receives named
ALL_THERE = "all its ranks are there"
LEFT = "other ranks have left it"  # of a collective in a graph: this rank is in the work behind it
SAVING = CHECKPOINT.name  # the group of the thread that saves


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """Operation that this rank waits in."""

    name: str  # description, equal on all ranks
    seconds: float  # duration of the wait
    ranks: Sequence[int] = ()  # global ranks that take part; empty if it may wait for none
    collective: Collective | None = None  # None if it has no number
    during: str = ""  # activity of this rank that led to it
    under_way: str = ""  # unfinished sends and receives
    in_graph: bool = False  # True if the device waits in a replay
    beside: bool = False  # True if it may be over, since it runs beside other work of a graph

    @property
    def saves(self) -> bool:
        """True if the thread that saves checkpoints waits in it."""
        return self.collective is not None and self.collective.group == SAVING

    @property
    def key(self) -> str | None:
        """Identifier, equal on all ranks in the operation; None if it has no number."""
        each = self.collective
        return None if each is None else f"{each.group}/{min(self.ranks)}/{each.number}"

    def __str__(self) -> str:
        return f"{self.name} ({self.during})" if self.during else self.name


@dataclass(frozen=True, slots=True)
class Look:
    """Examination of the other ranks of an operation."""

    heartbeats: Heartbeats
    wait: CollectiveWait
    timeout_s: float
    complete: bool = False  # True: it counts as hanging even if all hosts have called it

    def find(self) -> Finding:
        """Find the missing ranks, and whether waiting for one of them is justified."""
        own = self.heartbeats.rank
        others = self.heartbeats.read(rank for rank in self.wait.ranks if rank != own)
        if self.wait.in_graph and any(map(self._has_left, others.values())):
            return Finding((), words=LEFT)
        missing = {
            rank: seen
            for rank, seen in others.items()
            if not self._has_come(seen) or self._silent(seen) or self._mute(seen)
        }
        if not missing and not self.wait.beside:
            # all hosts have called it; look for ranks whose devices are behind
            missing = {
                rank: seen
                for rank, seen in others.items()
                if seen.record and not self._is_here(seen.record)
            }
        words = self._all(missing) or ALL_THERE
        excuse = None if any(map(self._silent, missing.values())) else self._excuse(missing)
        hangs, alarm = self._hang(missing)
        return Finding(tuple(islice(missing, SHOWN)), excuse, words=words, hangs=hangs, alarm=alarm)

    def _hang(self, missing: Mapping[int, Seen]) -> tuple[str, str]:
        """Describe the ranks that hang, and identify the hang; both empty if none does.

        Ranks that only wait for a hanging rank are not described here, but in the operation in
        which that rank is missing.
        """
        standing = {rank: seen for rank, seen in missing.items() if self._stands(seen)}
        if standing:
            rank, seen = next(iter(standing.items()))
            if seen.record is None or self._mute(seen):
                return self._all(standing), f"{rank}/beat/{seen.record.beat if seen.record else 0}"
            return self._all(standing), f"{rank}/moves/{self._doing(seen.record).moves}"
        among_themselves = missing and self._is_circle(missing)
        if among_themselves or (self.complete and not missing):
            return self._all(missing) or ALL_THERE, self.wait.key or self.wait.name
        return "", ""

    def _stands(self, seen: Seen) -> bool:
        """Return whether a rank visibly neither works nor waits for others."""
        record = seen.record
        if record is None or self._mute(seen):
            return seen.looks >= MUTE
        return self._is_still(record) and not record.missing

    def _is_still(self, record: Record) -> bool:
        doing = self._doing(record)
        return not doing.rests and not doing.busy and doing.quiet >= WARNS

    def _mute(self, seen: Seen) -> bool:
        return seen.looks >= MUTE

    def _is_circle(self, missing: Mapping[int, Seen]) -> bool:
        """Return whether the missing ranks wait, through any number of others, in a cycle."""
        known, front = {self.heartbeats.rank, *missing}, dict(missing)
        while front:
            records = [seen.record for seen in front.values() if not self._mute(seen)]
            waiting = [each for each in records if each and each.missing and self._is_still(each)]
            if len(waiting) < len(front):
                return False
            behind = {rank for record in waiting for rank in record.missing} - known
            known |= behind
            front = self.heartbeats.read(behind)
        return True

    def _all(self, missing: Mapping[int, Seen]) -> str:
        """Describe what these ranks do, at most SHOWN of them."""
        words = "; ".join(
            self._describe(rank, seen) for rank, seen in islice(missing.items(), SHOWN)
        )
        if len(missing) > SHOWN:
            return f"missing: ranks {compact(missing)}; {words}; …"
        return words

    def _has_come(self, seen: Seen) -> bool:
        each = self.wait.collective
        return (
            each is not None
            and seen.record is not None
            and seen.record.counts.get(each.group, 0) >= each.number
        )

    def _has_left(self, seen: Seen) -> bool:
        """Return whether a rank has begun the next collective of this group."""
        each, record = self.wait.collective, seen.record
        if each is None or record is None:
            return False
        return record.counts.get(each.group, 0) > each.number

    def _is_here(self, record: Record) -> bool:
        each = self.wait.collective
        return each is not None and record.waits == self.wait.name

    def _silent(self, seen: Seen) -> bool:
        return seen.silent_s > SILENT * self.timeout_s

    def _excuse(self, missing: Mapping[int, Seen]) -> int | None:
        """Find a working rank among the missing, or one for which a missing rank waits."""
        for rank, seen in missing.items():
            if self._works(seen):
                return rank
        named = {seen.record.excuse for seen in missing.values() if seen.record} - {
            None,
            self.heartbeats.rank,
        }
        behind = self.heartbeats.read(rank for rank in named if rank is not None)
        return next((rank for rank, seen in behind.items() if self._works(seen)), None)

    def _works(self, seen: Seen) -> bool:
        """Return whether a rank sends heartbeats, and rests or made progress recently."""
        record = seen.record
        if record is None or self._silent(seen):
            return False
        doing = self._doing(record)
        return doing.rests or doing.still_s < SAYS * self.timeout_s

    def _doing(self, record: Record) -> Doing:
        """Return the activity of the thread that has to join this operation."""
        return record.saving if self.wait.saves and record.saving else record.main

    def _describe(self, rank: int, seen: Seen) -> str:
        record = seen.record
        each = self.wait.collective
        if record is None:
            return f"rank {rank} has not come, and has given no sign of life"
        come = "" if each is None else " has come," if self._has_come(seen) else " has not come,"
        if self._silent(seen) or self._mute(seen):
            ago = max(seen.silent_s, time.time() - record.at)
            place = _place(record) or self._doing(record).words
            return f"rank {rank}{come} last sign of life {ago:.0f} s ago, in {place}"
        if record.missing:
            return f"rank {rank}{come} waits in {_place(record)} for {compact(record.missing)}"
        doing = self._doing(record)
        place = _place(record) or doing.words
        stands = place == doing.words and not doing.rests
        how = doing.busy or ("not computing" if stands else "")
        return f"rank {rank}{come} is in {place} for {doing.still_s:.0f} s{how and f', {how}'}"


def _place(record: Record) -> str:
    return f"{record.waits} ({record.during})" if record.during else record.waits


def compact(ranks: Collection[int]) -> str:
    """Return ranks as text, shortened if there are many."""
    shown = ", ".join(map(str, islice(ranks, 4 * SHOWN)))
    return shown if len(ranks) <= 4 * SHOWN else f"{shown}, … ({len(ranks)} in all)"
