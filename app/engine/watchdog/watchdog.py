"""Names what a rank is stuck in, and which ranks have not come there.

Threads beside the training look at what the rank does: its action, the collectives that it has
begun (`collectives`), its sends and receives. At every look they tell the other ranks
(`heartbeats`). A rank that has waited in one operation for WARNS looks warns of those that neither
come, nor work (`effort`), nor rest, nor wait for others, once, and says when it goes on (`alarms`).
A rank that has waited in one operation for almost `timeout_s` looks at those
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch.distributed as dist

from app.engine.watchdog.activity import Quiet, ThreadActivity
from app.engine.watchdog.alarms import Alarms
from app.engine.watchdog.collectives import (
    NOTHING,
    Collective,
    Recorded,
    count_enqueued,
    read_recorders,
)
from app.engine.watchdog.effort import COMPUTING, Effort
from app.engine.watchdog.heartbeats import JUDGES, Doing, Finding, Heartbeats, Record
from app.engine.watchdog.missing import (
    ASKS,
    MUTE,
    SAVING,
    SAYS,
    SHOWN,
    SILENT,
    WARNS,
    CollectiveWait,
    Look,
)

EXIT_STUCK = 124  # as `timeout` reports it
LOOK_S, LOOKS = 2.0, 40  # seconds between looks, and at least so many of them per timeout
READS = 20  # times per timeout that the recorders are read even while the rank makes progress
SILENCE = "the key-value store does not answer: rank 0 has it, or the first torchrun"
HALF = 0.5  # part of a timeout in one operation after which a rank always looks at the others
GRACE = 0.4  # part of a timeout from saying so to the end: at most 1.4 of one have then passed
# What all ranks do together that is no collective, or cannot be seen.
MEETINGS, REPLAYS = "meetings", "replays"


@dataclass(slots=True)
class Watchdog:
    """What this rank does, and whether it is stuck."""

    rank: int  # global rank
    timeout_s: float  # seconds in one operation after which the rank counts as stuck
    heartbeats: Heartbeats | None = None  # None: there are no other ranks, or they cannot be asked
    # Sends and receives that are not done, in words, with the rank at the other end.
    exchanges: Callable[[], Sequence[tuple[str, int]]] = tuple
    replays: bool = False  # CUDA graphs may hold collectives, which nothing here can see
    spins: bool = False  # the host burns CPU time while it waits for its device
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)  # by name
    main: ThreadActivity = field(default_factory=ThreadActivity)
    saving: ThreadActivity = field(
        default_factory=ThreadActivity
    )  # the thread that saves beside training
    _meetings: int = 0
    _steps: int = 0  # that have begun: what a graph replays nobody else counts
    _recorded: Recorded = NOTHING
    _changed: float = 0.0  # when the recorders last had news of the main thread; monotonic clock
    _news: int = 0  # times that they had
    _saving_news: int = 0  # the same of the thread that saves
    _main_quiet: Quiet = field(default_factory=Quiet)
    _saving_quiet: Quiet = field(default_factory=Quiet)
    _effort: Effort = field(default_factory=lambda: Effort(threading.get_ident()))
    _works: str = ""  # how the main thread does while it is quiet; empty: not visibly
    _findings: Mapping[str, Finding] = field(default_factory=dict)  # by name of the operation
    _alarms: Alarms = field(init=False)
    _said: bool = False  # that this rank is stuck
    _unanswered: int = 0  # looks since the store last answered
    _awake: float = -math.inf  # since when the process runs, if all of it was stopped before

    def __post_init__(self) -> None:
        self._alarms = Alarms(self.rank, self.timeout_s, self.look_s)

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return min(LOOK_S, self.timeout_s / LOOKS)

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
        self._effort = Effort(threading.get_ident())
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
            self._alarms.resolve(())
        except Exception:
            if self._said:  # what fails now has followed from it: others have ended
                end(EXIT_STUCK)
            raise
        finally:
            over.set()
            for thread in threads:
                thread.join(timeout=1.0)

    def _read(self, over: threading.Event) -> None:
        """Count collectives at every look, and read the recorders, which costs more, at those at
        which a thread is quiet.
        """
        due, compares = 0.0, False  # compares: the look before has read them too
        while not over.wait(self.look_s):
            before = self._recorded
            counts = count_enqueued(self.groups, before)
            self._note_news(before, Recorded(counts, before.under_way))
            self._recorded = Recorded(counts, before.under_way)
            reads = self._is_quiet() or time.monotonic() >= due
            if reads:
                due = time.monotonic() + self.timeout_s / READS
                found = read_recorders(self.groups, self._recorded)
                if compares:
                    self._note_news(self._recorded, found)
                self._recorded = found
            compares = reads

    def _note_news(self, before: Recorded, now: Recorded) -> None:
        if before.without(SAVING) != now.without(SAVING):
            self._changed = time.monotonic()
            self._news += 1
        elif before != now:
            self._saving_news += 1

    def _is_quiet(self) -> bool:
        saves = self.saving.since < math.inf
        return self._main_quiet.looks > 0 or (saves and self._saving_quiet.looks > 0)

    def _beat(self, over: threading.Event) -> None:
        assert self.heartbeats is not None
        with suppress(RuntimeError):  # the store has gone with its process: it does not answer
            while not over.wait(self.look_s):
                waits = self.waits()
                long = [
                    wait
                    for wait in waits
                    if wait.ranks
                    and (wait.seconds > HALF * self.timeout_s or self._quiet_looks(wait) >= ASKS)
                ]
                found = ((wait.name, self._ask(self.heartbeats, wait)) for wait in long)
                self._findings = {name: finding for name, finding in found if finding is not None}
                self.heartbeats.publish(self._record(waits))
                self._unanswered = 0
                self._warn(self.heartbeats, waits)

    def _warn(self, heartbeats: Heartbeats, waits: Sequence[CollectiveWait]) -> None:
        for wait in waits:
            finding = self._findings.get(wait.name)
            if finding is None or not finding.hangs or self._quiet_looks(wait) < WARNS:
                continue
            if heartbeats.claim(finding.alarm):
                self._alarms.warn(wait, finding.hangs)

    def _warn_of_store(self, waits: Sequence[CollectiveWait]) -> None:
        """Of a store that does not answer; nobody can settle who does, so the first ranks do."""
        for wait in waits:
            first = self.rank in sorted(wait.ranks)[:JUDGES]
            if first and self._unanswered >= MUTE and self._quiet_looks(wait) >= WARNS:
                self._alarms.warn(wait, SILENCE)

    def _quiet_looks(self, wait: CollectiveWait) -> int:
        """For how many looks the thread that is in this operation has come to nothing new."""
        if wait.saves:
            return self._saving_quiet.looks
        return 0 if self.main.rests(self._under_way(self.main)) else self._main_quiet.looks

    def _watch(self, over: threading.Event, end: Callable[[int], object]) -> None:
        looked = time.monotonic()
        while not over.wait(self.look_s):
            before = looked
            looked = time.monotonic()
            if looked - before > SILENT * self.timeout_s:
                self._awake = looked
            self._unanswered += 1
            self._look()
            waits = self.waits()
            self._alarms.resolve(waits)
            if self.heartbeats is not None:
                self._warn_of_store(waits)
            if words := self.verdict():
                self._said = True
                print(words, file=sys.stderr, flush=True)
                if not over.wait(self.timeout_s * GRACE):
                    end(EXIT_STUCK)
                return

    def _look(self) -> None:
        """Count for how long the threads of this rank are quiet, and see whether it works."""
        self._main_quiet.look(self.main.moves + self._news)
        self._saving_quiet.look(self.saving.moves + self._saving_news)
        if self._main_quiet.looks == 0:
            self._effort.forget()
            self._works = ""
        else:
            self._works = self._effort.look()

    def waits(self) -> list[CollectiveWait]:
        """What this rank is in now, the longest first: collectives, or what its threads noted."""
        found = []
        for activity in (self.main, self.saving):
            own = self._under_way(activity)
            now = time.time()
            found += [self._in_collective(each, now - each.since) for each in own]
            if activity.since < math.inf and not own:
                found.append(self._in_action() if activity is self.main else self._in_saving())
        awake = time.monotonic() - self._awake
        found = [replace(wait, seconds=min(wait.seconds, awake)) for wait in found]
        return sorted(found, key=lambda wait: -wait.seconds)

    def _under_way(self, activity: ThreadActivity) -> list[Collective]:
        saving = activity is self.saving
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
        main = Doing(
            self.main.doing,
            0.0 if rests else self._still_s(),
            rests,
            quiet=self._main_quiet.looks,
            moves=self._main_quiet.moves,
            busy=self._busy(),
        )
        saving = None
        if self.saving.doing:
            rests = self.saving.rests(self._under_way(self.saving))
            since = self.saving.began
            saving = Doing(
                self.saving.doing,
                0.0 if rests else time.time() - since,
                rests,
                quiet=self._saving_quiet.looks,
                moves=self._saving_quiet.moves,
            )
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

    def _busy(self) -> str:
        """How the main thread works; while it waits for a device that is in a collective, no."""
        waits = self.spins and (self._under_way(self.main) or self.exchanges())
        return "" if waits and self._works == COMPUTING else self._works

    def _ask(self, heartbeats: Heartbeats, wait: CollectiveWait) -> Finding | None:
        """Who is missing in an operation; None: not known yet."""
        unseen = wait.collective is None or wait.collective.group in (MEETINGS, REPLAYS)
        look = Look(heartbeats, wait, self.timeout_s, complete=self.spins and not unseen)
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
        if self._unanswered * self.look_s > SILENT * self.timeout_s:
            return f"; {SILENCE}"
        finding = self._findings.get(wait.name)
        return None if finding is None or finding.excuse is not None else f"; {finding.words}"
