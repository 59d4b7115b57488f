"""Names what a rank is stuck in, and which ranks have not come there.

Threads beside the training look at what the rank does: its action, the collectives that it has
begun (`collectives`), its sends and receives. Twenty times per `timeout_s` they tell the other
ranks (`heartbeats`). A rank that has waited in one operation for almost `timeout_s` looks at those
that are missing there (`missing`). It goes on waiting for one that shows signs of life and rests,
which may take any time, or has not been at the same place for long, or rightly waits for such a
rank itself. Otherwise every waiting rank says what it waits for, and ends with EXIT_STUCK a little
later, so that the others can say theirs.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from app.engine.watchdog.collectives import NOTHING, Collective, Recorded, read_recorders
from app.engine.watchdog.heartbeats import Doing, Finding, Heartbeats, Record
from app.engine.watchdog.missing import SAVING, SAYS, SHOWN, SILENT, CollectiveWait, Look

EXIT_STUCK = 124  # as `timeout` reports it
LOOKS = 20  # per timeout
ASKS = 0.5  # part of a timeout in one operation after which a rank looks at the others
GRACE = 0.4  # part of a timeout from saying so to the end: at most 1.4 of one have then passed
# What all ranks do together that is no collective, or cannot be seen.
MEETINGS, REPLAYS = "meetings", "replays"


@dataclass(slots=True)
class Strand:
    """What one thread of this rank does, as told by itself."""

    doing: str = ""
    since: float = math.inf  # on the monotonic clock; inf: resting
    began: float = 0.0  # the same by the wall clock
    meeting: int = 0  # of all ranks, outside of collectives, from 1; 0: it is in none

    # Other threads read these one by one: a new time beside old words does no harm, but an old
    # time beside new words would.
    def note(self, doing: str, meeting: int = 0) -> None:
        """From now on the thread does this."""
        self.since = time.monotonic()
        self.began = time.time()
        self.doing = doing
        self.meeting = meeting

    def rest(self, doing: str = "") -> None:
        """From now on it does what may take any time, until it enters a collective."""
        self.began = time.time()
        self.doing = doing
        self.since = math.inf

    def rests(self, under_way: Iterable[Collective]) -> bool:
        """Whether it does, and has entered none since: those of before go on beside it."""
        return self.since == math.inf and all(each.since < self.began for each in under_way)


@dataclass(slots=True)
class Watchdog:
    """What this rank does, and whether it is stuck."""

    rank: int  # global rank
    timeout_s: float  # seconds in one operation after which the rank counts as stuck
    heartbeats: Heartbeats | None = None  # None: there are no other ranks, or they cannot be asked
    # Sends and receives that are not done, in words, with the rank at the other end.
    exchanges: Callable[[], Sequence[tuple[str, int]]] = tuple
    replays: bool = False  # CUDA graphs may hold collectives, which nothing here can see
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)  # by name
    main: Strand = field(default_factory=Strand)
    saving: Strand = field(default_factory=Strand)  # the thread that saves beside training
    _meetings: int = 0
    _steps: int = 0  # that have begun: what a graph replays nobody else counts
    _recorded: Recorded = NOTHING
    _changed: float = 0.0  # when the recorders last had news of the main thread; monotonic clock
    _findings: Mapping[str, Finding] = field(default_factory=dict)  # by name of the operation
    _said: bool = False  # that this rank is stuck
    _unanswered: int = 0  # looks since the store last answered
    _awake: float = -math.inf  # since when the process runs, if all of it was stopped before

    @property
    def doing(self) -> str:
        """What the main thread does, in the words of its last note."""
        return self.main.doing

    def note(self, doing: str) -> None:
        """From now on the rank does this."""
        self.main.note(doing)

    def step(self, doing: str) -> None:
        """From now on the rank does this, of a further step."""
        self._steps += 1
        self.main.note(doing)

    def rest(self, doing: str = "") -> None:
        """From now on the rank does what may take any time, until it enters a collective."""
        self.main.rest(doing)

    def meet(self, doing: str) -> None:
        """From now on the rank does this, as all others do, outside of collectives."""
        self._meetings += 1
        self.main.note(doing, self._meetings)

    def follow(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Watch the collectives of these groups too."""
        # Another thread walks the old mapping.
        self.groups = {
            **self.groups,
            **{name: group for name, group in groups.items() if group.size() > 1},
        }

    @contextmanager
    def running(self, end: Callable[[int], object] = os._exit) -> Iterator[None]:
        """Look at the rank from other threads; `end` is called with EXIT_STUCK when it is stuck."""
        over = threading.Event()
        # Three, since two may block: the recorders where another thread holds CUDA's lock, and the
        # store with the process that keeps it.
        loops: list[Callable[[threading.Event], None]] = [partial(self._watch, end=end)]
        if self.heartbeats is not None:
            loops += [self._read, self._beat]
        threads = [
            threading.Thread(target=loop, args=(over,), daemon=True, name="watch") for loop in loops
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        except Exception:
            if self._said:  # what fails now has followed from it: others have ended
                end(EXIT_STUCK)
            raise
        finally:
            over.set()
            for thread in threads:
                thread.join(timeout=1.0)

    def _read(self, over: threading.Event) -> None:
        while not over.wait(self.timeout_s / LOOKS):
            before = self._recorded
            self._recorded = read_recorders(self.groups, self._recorded)
            if before.without(SAVING) != self._recorded.without(SAVING):
                self._changed = time.monotonic()

    def _beat(self, over: threading.Event) -> None:
        assert self.heartbeats is not None
        with suppress(RuntimeError):  # the store has gone with its process: it does not answer
            while not over.wait(self.timeout_s / LOOKS):
                waits = self.waits()
                long = [
                    wait for wait in waits if wait.seconds > ASKS * self.timeout_s and wait.ranks
                ]
                found = ((wait.name, self._ask(self.heartbeats, wait)) for wait in long)
                self._findings = {name: finding for name, finding in found if finding is not None}
                self.heartbeats.publish(self._record(waits))
                self._unanswered = 0

    def _watch(self, over: threading.Event, end: Callable[[int], object]) -> None:
        looked = time.monotonic()
        while not over.wait(self.timeout_s / LOOKS):
            before = looked
            looked = time.monotonic()
            if looked - before > SILENT * self.timeout_s:
                self._awake = looked
            self._unanswered += 1
            if words := self.verdict():
                self._said = True
                print(words, file=sys.stderr, flush=True)
                if not over.wait(self.timeout_s * GRACE):
                    end(EXIT_STUCK)
                return

    def waits(self) -> list[CollectiveWait]:
        """What this rank is in now, the longest first: collectives, or what its threads noted."""
        found = []
        for strand in (self.main, self.saving):
            own = self._under_way(strand)
            now = time.time()
            found += [self._in_collective(each, now - each.since) for each in own]
            if strand.since < math.inf and not own:
                found.append(self._in_action() if strand is self.main else self._in_saving())
        awake = time.monotonic() - self._awake
        found = [replace(wait, seconds=min(wait.seconds, awake)) for wait in found]
        return sorted(found, key=lambda wait: -wait.seconds)

    def _under_way(self, strand: Strand) -> list[Collective]:
        saving = strand is self.saving
        return [each for each in self._recorded.under_way if (each.group == SAVING) == saving]

    def _in_collective(self, each: Collective, seconds: float) -> CollectiveWait:
        doing = self.saving.doing if each.group == SAVING else self.main.doing
        ranks = dist.get_process_group_ranks(self.groups[each.group])
        return CollectiveWait(str(each), seconds, ranks, collective=each, during=doing)

    def _in_saving(self) -> CollectiveWait:
        """In a collective that the recorder has dropped, since training has had thousands."""
        number = self._recorded.counts.get(SAVING, 0)
        seconds = time.monotonic() - self.saving.since
        return self._in_collective(
            Collective(SAVING, "exchange", number, since=self.saving.began), seconds
        )

    def _in_action(self) -> CollectiveWait:
        doing = self.main.doing
        seconds = self._still_s()
        if exchanges := self.exchanges():
            words = ", ".join(words for words, _ in exchanges[:SHOWN])
            return CollectiveWait(
                doing, seconds, sorted({rank for _, rank in exchanges}), under_way=words
            )
        everybody = range(self.heartbeats.world_size) if self.heartbeats else ()
        if self.main.meeting:
            return CollectiveWait(
                doing,
                seconds,
                everybody,
                collective=Collective(MEETINGS, doing, self.main.meeting, since=self.main.began),
            )
        if self.replays:
            return CollectiveWait(
                doing,
                seconds,
                everybody,
                collective=Collective(REPLAYS, doing, self._steps, since=self.main.began),
            )
        return CollectiveWait(doing, seconds)

    def _still_s(self) -> float:
        """Seconds for which the main thread has come to no other action or collective."""
        since = self.main.since if self.main.since < math.inf else 0.0
        return time.monotonic() - max(since, self._changed)

    def _record(self, waits: Sequence[CollectiveWait]) -> Record:
        rests = self.main.rests(self._under_way(self.main))
        main = Doing(self.main.doing, 0.0 if rests else self._still_s(), rests)
        saving = None
        if self.saving.doing:
            rests = self.saving.rests(self._under_way(self.saving))
            since = self.saving.began
            saving = Doing(self.saving.doing, 0.0 if rests else time.time() - since, rests)
        counts = {
            **self._recorded.counts,
            MEETINGS: self._meetings,
            REPLAYS: self._steps,
        }
        if not waits:
            return Record(main, saving, counts)
        finding = self._findings.get(waits[0].name, Finding(()))
        return Record(
            main,
            saving,
            counts,
            waits=waits[0].name,
            missing=finding.missing,
            excuse=finding.excuse,
        )

    def _ask(self, heartbeats: Heartbeats, wait: CollectiveWait) -> Finding | None:
        """Who is missing in an operation; None: not known yet."""
        look = Look(heartbeats, wait, self.timeout_s)
        if wait.key is None:
            return look.find()
        return heartbeats.share(wait.key, look.find, SILENT * self.timeout_s)

    def verdict(self) -> str | None:
        """What to say when the rank is stuck, otherwise None."""
        for wait in self.waits():
            if wait.seconds <= SAYS * self.timeout_s:
                return None
            if (whom := self._whom(wait)) is not None:
                limit = f"schedule.timeout_s={self.timeout_s:g}"
                under_way = wait.under_way and f"; under way: {wait.under_way}"
                stuck = f"rank {self.rank} is stuck in {wait} for {wait.seconds:.0f} s ({limit})"
                return f"{stuck}{under_way}{whom}"
        return None

    def _whom(self, wait: CollectiveWait) -> str | None:
        """For whom it waits in vain, in words; None: it waits rightly."""
        if self.heartbeats is None or not wait.ranks:
            return ""
        if self._unanswered > SILENT * LOOKS:
            return "; the key-value store does not answer: rank 0 has it, or the first torchrun"
        finding = self._findings.get(wait.name)
        return None if finding is None or finding.excuse is not None else f"; {finding.words}"
