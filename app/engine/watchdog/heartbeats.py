"""What the ranks of a run tell each other about themselves, through a key-value store.

Every rank writes one short record per look, and reads those of others only when it has waited for
several looks. At 10,000 ranks and the usual 2 s per look that is 5,000 writes of about 300
bytes per second. Of those who wait in the same operation the first JUDGES read the records of all
its ranks and write down what they find, which the others read: so when everybody waits, every
record is still read JUDGES times per look only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch.distributed as dist

from app.torch_versions import another_connection

PREFIX = "heartbeats"  # of our keys in a store that others use too
JUDGES = 2  # ranks that look after all others of an operation; two, since one may die of it


@dataclass(frozen=True, slots=True)
class Doing:
    """What a thread of a rank does."""

    words: str
    still_s: float  # seconds without any progress
    rests: bool  # it does what may take any time, and waits for nobody
    quiet: int = 0  # looks in a row without any progress
    moves: int = 0  # times that it made progress
    busy: str = ""  # how it works without progress that could be counted; empty: not visibly


@dataclass(frozen=True, slots=True)
class Record:
    """What a rank tells about itself."""

    main: Doing
    saving: Doing | None  # the thread that saves beside training; None: it has nothing to do
    counts: dict[str, int]  # group -> collectives that this rank has enqueued in it
    waits: str = ""  # the operation that it waits in, in words
    missing: tuple[int, ...] = ()  # the first of the ranks that have not come there
    excuse: int | None = None  # one of them, or behind them, for which it waits rightly
    at: float = 0.0  # seconds, wall clock of that rank
    beat: int = 0  # another number in every record

    def text(self) -> str:
        """The record as JSON, for the store."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, text: bytes) -> Record:
        """The record that `text` made."""
        values = json.loads(text)
        main = Doing(**values.pop("main"))
        saving = values.pop("saving")
        missing = tuple(values.pop("missing"))
        return cls(main, saving and Doing(**saving), missing=missing, **values)


@dataclass(frozen=True, slots=True)
class Seen:
    """A rank as another one sees it."""

    record: Record | None  # None: it has never written one
    silent_s: float  # seconds for which it has written no other, as far as the other one has looked
    looks: int = 0  # how often the other one has looked meanwhile


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of those for whom an operation waits."""

    missing: tuple[int, ...]  # the first ranks that have not come, or have stopped in it
    excuse: int | None = None  # the rank for which it rightly goes on waiting; None: in vain
    words: str = ""  # what the missing ranks do
    hangs: str = ""  # what those do that hang, as far as can be seen; empty: none does
    alarm: str = ""  # the same wherever one hang is found, and different for another


@dataclass(slots=True)
class Heartbeats:
    """One rank's way to the records; only one thread may use it.

    `store` should be a connection of its own: one that the training waits on answers nobody else.
    """

    store: dist.Store
    rank: int  # global rank
    world_size: int
    beats: int = 0  # written so far
    _known: set[int] = field(default_factory=set)  # ranks that have written a record
    # Key -> newest beat, and when and at which beat of our own we first saw it.
    _seen: dict[str, tuple[int, float, int]] = field(default_factory=dict)
    _judged: set[str] = field(default_factory=set)  # operations that this rank looks after
    _asked: set[str] = field(default_factory=set)  # operations for which it was settled who does
    _claimed: set[str] = field(default_factory=set)  # alarms of which it was settled who tells

    @classmethod
    def over(cls, store: dist.Store, rank: int, world_size: int) -> Heartbeats:
        """With a connection of its own to the store in which the ranks meet."""
        return cls(dist.PrefixStore(PREFIX, another_connection(store)), rank, world_size)

    def publish(self, record: Record) -> None:
        """Write this rank's record, with the time and the next beat, to the store."""
        self.beats += 1
        self.store.set(
            f"rank/{self.rank}", dataclasses.replace(record, at=time.time(), beat=self.beats).text()
        )

    def read(self, ranks: Iterable[int]) -> dict[int, Seen]:
        """The newest records of these ranks."""
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
        """What a judge of an operation has found; `find` is called where this rank is one.

        Judges that have written nothing new for `patience_s` are joined by this rank. None: nobody
        has found anything yet.
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
        """Whether this rank is the one that tells of a hang, asked for the first time."""
        if alarm in self._claimed:
            return False
        self._claimed.add(alarm)
        return self.store.add(f"alarms/{alarm}", 1) == 1

    def _look(self, rank: int, record: Record | None) -> Seen:
        silent_s = self._unchanged_s(str(rank), record.beat if record else 0)
        return Seen(record, silent_s, self.beats - self._seen[str(rank)][2])

    def _unchanged_s(self, key: str, beat: int) -> float:
        # By our own clock: those of two hosts may differ.
        now = time.monotonic()
        before = self._seen.get(key)
        if before is None or before[0] != beat:
            self._seen[key] = before = beat, now, self.beats
        return now - before[1]
