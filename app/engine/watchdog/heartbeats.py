"""Heartbeats of the ranks of a run, through a key-value store.

Every rank writes one short record per look, and reads those of others only after it has waited for
several looks. At 10,000 ranks and 2 s per look that is 5,000 writes of about 300 bytes per second.
Of the ranks that wait in one operation, the first JUDGES read the records of all its ranks and
write down their finding, which the others read. So even if all ranks wait, every record is read
only JUDGES times per look.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from app.torch_versions import another_connection

PREFIX = "heartbeats"  # of our keys in a shared store
JUDGES = 2  # ranks that examine all ranks of an operation; two, since one may hang or die


@dataclass(frozen=True, slots=True)
class Doing:
    """Activity of a thread of a rank, as published."""

    words: str
    still_s: float  # seconds without any progress
    rests: bool  # True if its work may take any time and waits for no other rank
    quiet: int = 0  # looks in a row without any progress
    moves: int = 0  # times that it made progress
    busy: str = ""  # "compiling" or "computing" without countable progress; empty: not visibly


@dataclass(frozen=True, slots=True)
class Record:
    """Heartbeat of a rank."""

    main: Doing
    saving: Doing | None  # the thread that saves checkpoints; None if idle
    counts: dict[str, int]  # group -> collectives enqueued there by this rank
    waits: str = ""  # description of the operation that it waits in
    during: str = ""  # action, layer and phase of that within a graph
    missing: tuple[int, ...] = ()  # the first ranks that have not arrived there
    excuse: int | None = None  # a rank still working for which, directly or not, it waits
    at: float = 0.0  # seconds, wall clock of that rank
    beat: int = 0  # counter, different in every record

    def text(self) -> str:
        """Return the record as JSON, for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: bytes) -> Record:
        """Parse the output of `text`."""
        values = json.loads(text)
        main = Doing(**values.pop("main"))
        saving = values.pop("saving")
        missing = tuple(values.pop("missing"))
        return cls(main, saving and Doing(**saving), missing=missing, **values)


@dataclass(frozen=True, slots=True)
class Seen:
    """State of a rank as seen by another."""

    record: Record | None  # None if it has never written one
    silent_s: float  # seconds without a new record, as observed
    looks: int = 0  # looks of the observer in that time


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about the ranks that an operation waits for."""

    missing: tuple[int, ...]  # the first ranks that have not arrived, or stopped inside
    excuse: int | None = None  # a rank still working that justifies the wait; None if none does
    words: str = ""  # description of the missing ranks
    hangs: str = ""  # description of ranks that hang; empty if none visibly does
    alarm: str = ""  # identifier of the hang, equal on all ranks that find it


@dataclass(slots=True)
class Heartbeats:
    """One rank's access to all heartbeats; used by one thread only.

    `store` should be a separate connection: one that training waits on answers nothing else.
    """

    store: dist.Store
    rank: int  # global rank
    world_size: int
    beats: int = 0  # records written so far
    _known: set[int] = field(default_factory=set)  # ranks that have written a record
    # Key -> (newest beat, time and own beat at which we first saw it).
    _seen: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    _judged: set[str] = field(default_factory=set)  # operations that this rank judges
    _asked: set[str] = field(default_factory=set)  # operations whose judges are settled
    _claimed: set[str] = field(default_factory=set)  # alarms whose reporting rank is settled

    @classmethod
    def over(cls, store: dist.Store, rank: int, world_size: int) -> Heartbeats:
        """Build it with a separate connection to the store of the ranks."""
        return cls(dist.PrefixStore(PREFIX, another_connection(store)), rank, world_size)

    def publish(self, record: Record) -> None:
        """Write this rank's record, with the time and the next beat, to the store."""
        self.beats += 1
        self.store.set(
            f"rank/{self.rank}", dataclasses.replace(record, at=time.time(), beat=self.beats).text()
        )

    def read(self, ranks: Iterable[int]) -> dict[int, Seen]:
        """Read the newest records of these ranks."""
        ranks = list(ranks)
        unknown = [rank for rank in ranks if rank not in self._known]
        if unknown and self.store.check([f"rank/{rank}" for rank in unknown]):
            self._known.update(unknown)
        else:
            self._known.update(rank for rank in unknown if self.store.check([f"rank/{rank}"]))
        known = [rank for rank in ranks if rank in self._known]
        found = self.store.multi_get([f"rank/{rank}" for rank in known]) if known else []
        records = dict(zip(known, map(Record.parse, found), strict=True))
        return {rank: self._look(rank, records.get(rank)) for rank in ranks}

    def share(
        self, operation: str, find: Callable[[], Finding], patience_s: float
    ) -> Finding | None:
        """Return a judge's finding about an operation; `find` is called if this rank is a judge.

        This rank becomes a judge too if the others have written nothing new for `patience_s`. None
        if there is no finding yet.
        """
        key = f"found/{operation}"
        if operation not in self._asked:
            self._asked.add(operation)
            if self.store.add(f"judges/{operation}", 1) <= JUDGES:
                self._judged.add(operation)
        if operation in self._judged:
            finding = find()
            self.store.set(key, json.dumps({"beat": self.beats, **dataclasses.asdict(finding)}))
            return finding
        written = json.loads(self.store.get(key)) if self.store.check([key]) else {"beat": 0}
        if self._unchanged_s(key, written.pop("beat")) > patience_s:
            self._judged.add(operation)
        return Finding(**written) if written else None

    def claim(self, alarm: str) -> bool:
        """Return whether this rank is to report an alarm: True once, on one rank."""
        if alarm in self._claimed:
            return False
        self._claimed.add(alarm)
        return self.store.add(f"alarms/{alarm}", 1) == 1

    def _look(self, rank: int, record: Record | None) -> Seen:
        silent_s = self._unchanged_s(str(rank), record.beat if record else 0)
        return Seen(record, silent_s, self.beats - self._seen[str(rank)][2])

    def _unchanged_s(self, key: str, beat: int) -> float:
        # By our own clock, since clocks of two hosts may differ.
        now = time.monotonic()
        before = self._seen.get(key)
        if before is None or before[0] != beat:
            self._seen[key] = before = beat, now, self.beats
        return now - before[1]
