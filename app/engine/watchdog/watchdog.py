"""Watchdog: report the operation that a rank is stuck in, and the ranks missing there.

1. Threads beside training look, every few seconds, at what the rank does: its action, the
   collectives it has called (`collectives`), its sends and receives.
2. At every look they publish that to the other ranks (`heartbeats`).
3. A rank that has waited in one operation for WARNS looks warns once of ranks that neither arrive,
   nor compute (`effort`), nor rest, nor wait for others; and reports when it continues (`alarms`).
4. A rank that has waited for almost `timeout_s` examines the missing ranks (`missing`). It keeps
   waiting for a rank that sends heartbeats and rests, which may take any time, or made progress
   recently, or itself waits for such a rank.
5. Otherwise every waiting rank prints what it waits for, and exits with EXIT_STUCK a little later,
   so that the others have time to print theirs.
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
from app.engine.watchdog.graph_waits import graph_counts, waits_in_graph
from app.engine.watchdog.heartbeats import JUDGES, Doing, Finding, Heartbeats, Record
from app.engine.watchdog.marks import Marks, Position
from app.engine.watchdog.missing import (
    ASKS,
    LEFT,
    MUTE,
    SAVING,
    SAYS,
    SHOWN,
    SILENT,
    WARNS,
    CollectiveWait,
    Look,
)

EXIT_STUCK = 124  # exit code, as of coreutils' `timeout`
LOOK_S, LOOKS = 2.0, 40  # seconds between looks; minimum of looks per timeout
READS = 20  # reads of the recorders per timeout while the rank makes progress
SILENCE = "the key-value store does not answer: rank 0 has it, or the first torchrun"
HALF = 0.5  # share of a timeout in one operation after which a rank always examines the others
GRACE = 0.4  # share of a timeout from the report to the exit, at most 1.4 timeouts in all
# Pseudo-groups: rendezvous of all ranks outside collectives, and graphs, which hide collectives.
MEETINGS, REPLAYS = "meetings", "replays"


@dataclass(slots=True)
class Watchdog:
    """Watchdog of one rank: records what it does, and reports if it is stuck."""

    rank: int  # global rank
    timeout_s: float  # seconds in one operation after which the rank counts as stuck
    heartbeats: Heartbeats | None = None  # None without other ranks, or without a store
    # Returns unfinished sends and receives: (description, rank at the other end).
    pending_p2p: Callable[[], Sequence[tuple[str, int]]] = tuple
    replays: bool = False  # True if CUDA graphs or kernels may hold waits invisible here
    reads: bool = True  # False if torch's recorders hold events that must not be queried
    marks: Marks | None = None  # of captured graphs; None without
    spins: bool = False  # the host burns CPU time while it waits for its device
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)  # by name
    main: ThreadActivity = field(default_factory=ThreadActivity)
    saving: ThreadActivity = field(
        default_factory=ThreadActivity
    )  # the thread that saves beside training
    _meetings: int = 0
    _steps: int = 0  # steps begun; stands for the uncounted collectives of graph replays
    _recorded: Recorded = NOTHING
    _changed: float = 0.0  # monotonic time of the recorders' last news of the main thread
    _marked: int = 0  # marks of graphs passed at the last look
    _news: int = 0  # times that the recorders had news of the main thread
    _saving_news: int = 0  # the same for the thread that saves
    _main_quiet: Quiet = field(default_factory=Quiet)
    _saving_quiet: Quiet = field(default_factory=Quiet)
    _effort: Effort = field(default_factory=lambda: Effort(threading.get_ident()))
    _works: str = ""  # work of the main thread while it is quiet; empty: none visible
    _findings: Mapping[str, Finding] = field(default_factory=dict)  # by name of the operation
    _alarms: Alarms = field(init=False)
    _said: bool = False  # True once this rank has reported itself stuck
    _unanswered: int = 0  # looks since the store's last answer
    _awake: float = -math.inf  # when the process continued, if it was stopped as a whole

    def __post_init__(self) -> None:
        self._alarms = Alarms(self.rank, self.timeout_s, self.look_s)

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return min(LOOK_S, self.timeout_s / LOOKS)

    @property
    def doing(self) -> str:
        """Last note of the main thread."""
        return self.main.doing

    def note(self, doing: str) -> None:
        """Note what the rank does from now on."""
        self.main.note(doing)
        if self.marks is not None:
            self.marks.act()

    def step(self, doing: str) -> None:
        """Note the same at the beginning of a step, and count the step."""
        self._steps += 1
        self.main.note(doing)

    def rest(self, doing: str = "") -> None:
        """Note work that may take any time, until the rank enters a collective."""
        self.main.rest(doing)

    def meet(self, doing: str) -> None:
        """Note a rendezvous of all ranks outside collectives."""
        self._meetings += 1
        self.main.note(doing, self._meetings)

    def follow(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """Watch the collectives of these groups too."""
        # A new mapping, since another thread may iterate over the old one.
        self.groups = {
            **self.groups,
            **{name: group for name, group in groups.items() if group.size() > 1},
        }

    @contextmanager
    def running(self, end: Callable[[int], object] = os._exit) -> Iterator[None]:
        """Watch the rank from other threads; `end(EXIT_STUCK)` is called if it is stuck."""
        over = threading.Event()
        self._effort = Effort(threading.get_ident())
        # Three threads, since two may block: reading the recorders while another thread holds
        # CUDA's lock, and the store if the process that keeps it hangs.
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
            if self._said:  # a consequence of the hang, as other ranks have exited
                end(EXIT_STUCK)
            raise
        finally:
            over.set()
            for thread in threads:
                thread.join(timeout=1.0)

    def _read(self, over: threading.Event) -> None:
        """Count collectives at every look; read the recorders, which costs more, only if needed.

        They are read if a thread is quiet, and READS times per timeout.
        """
        due, compares = 0.0, False  # compares: the recorders were read at the look before too
        while not over.wait(self.look_s):
            before = self._recorded
            counts = count_enqueued(self.groups, before)
            self._note_news(before, Recorded(counts, before.under_way))
            self._recorded = Recorded(counts, before.under_way)
            reads = self.reads and (self._is_quiet() or time.monotonic() >= due)
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
        """At every look: examine long waits, publish this rank's record, warn of hangs."""
        assert self.heartbeats is not None
        with suppress(RuntimeError):  # the store's process is gone: it no longer answers
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
        """Warn of hangs found in long waits; one rank of all prints each of them."""
        for wait in waits:
            finding = self._findings.get(wait.name)
            if finding is None or not finding.hangs or self._quiet_looks(wait) < WARNS:
                continue
            if heartbeats.claim(finding.alarm):
                self._alarms.warn(wait, finding.hangs)

    def _warn_of_store(self, waits: Sequence[CollectiveWait]) -> None:
        """Warn of a store that does not answer, on the first ranks, as none can be elected."""
        for wait in waits:
            first = self.rank in sorted(wait.ranks)[:JUDGES]
            if first and self._unanswered >= MUTE and self._quiet_looks(wait) >= WARNS:
                self._alarms.warn(wait, SILENCE)

    def _quiet_looks(self, wait: CollectiveWait) -> int:
        """Return the looks without progress of the thread that waits in this operation."""
        if wait.saves:
            return self._saving_quiet.looks
        return 0 if self.main.rests(self._under_way(self.main)) else self._main_quiet.looks

    def _watch(self, over: threading.Event, end: Callable[[int], object]) -> None:
        """Report and end a stuck rank; this thread never blocks on the store or the recorders."""
        looked = time.monotonic()
        while not over.wait(self.look_s):
            before = looked
            looked = time.monotonic()
            if looked - before > SILENT * self.timeout_s:
                self._awake = looked  # the whole process was stopped: waits count from here
            self._unanswered += 1
            self._look()
            waits = self.waits()
            self._alarms.resolve(waits)
            if self.heartbeats is not None:
                self._warn_of_store(waits)
            if words := self.verdict():
                self._said = True
                print(words, file=sys.stderr, flush=True)
                # time for the other ranks to print theirs before torchrun ends them
                if not over.wait(self.timeout_s * GRACE):
                    end(EXIT_STUCK)
                return

    def _look(self) -> None:
        """Update quiet times of this rank's threads, and whether it visibly works."""
        if self.marks is not None and (marked := self.marks.passed()) != self._marked:
            self._marked, self._changed = marked, time.monotonic()
        self._main_quiet.look(self.main.moves + self._news + self._marked)
        self._saving_quiet.look(self.saving.moves + self._saving_news)
        if self._main_quiet.looks == 0:
            self._effort.forget()
            self._works = ""
        else:
            self._works = self._effort.look()

    def waits(self) -> list[CollectiveWait]:
        """Return this rank's waits, longest first: collectives, or what its threads noted."""
        found: list[CollectiveWait] = []
        for activity in (self.main, self.saving):
            own = self._under_way(activity)
            now = time.time()
            if activity is self.main and (position := self._in_graph()):
                found += waits_in_graph(position, self.marks, self.groups, self._still_s())
                continue
            found += [self._in_collective(each, now - each.since) for each in own]
            if activity.since < math.inf and not own:
                if activity is self.main:
                    found.append(self._in_action())
                elif SAVING in self.groups:  # a single rank waits for no other
                    found.append(self._in_saving())
        awake = time.monotonic() - self._awake
        found = [replace(wait, seconds=min(wait.seconds, awake)) for wait in found]
        # Of waits that last equally long, that for a missing rank comes first.
        return sorted(found, key=lambda wait: (-wait.seconds, not self._finding(wait).missing))

    def _finding(self, wait: CollectiveWait) -> Finding:
        return self._findings.get(wait.name, Finding(()))

    def _in_graph(self) -> Position | None:
        """Return where the device is within a replay, unless the main thread rests."""
        if self.marks is None or self.main.since == math.inf:
            return None
        return self.marks.position()

    def _under_way(self, activity: ThreadActivity) -> list[Collective]:
        saving = activity is self.saving
        return [each for each in self._recorded.under_way if (each.group == SAVING) == saving]

    def _in_collective(self, each: Collective, seconds: float) -> CollectiveWait:
        doing = self.saving.doing if each.group == SAVING else self.main.doing
        ranks = dist.get_process_group_ranks(self.groups[each.group])
        return CollectiveWait(str(each), seconds, ranks, collective=each, during=doing)

    def _in_saving(self) -> CollectiveWait:
        """Return the saving thread's wait in a collective that the recorder has dropped.

        The recorder keeps the newest 2,000, and training may call more during a save.
        """
        number = self._recorded.counts.get(SAVING, 0)
        seconds = time.monotonic() - self.saving.since
        return self._in_collective(
            Collective(SAVING, "collective", number, since=self.saving.began), seconds
        )

    def _in_action(self) -> CollectiveWait:
        """Return the main thread's wait outside recorded collectives.

        It may wait for pipeline P2P, for all ranks at a rendezvous, or within a graph's replay;
        otherwise the ranks waited for are unknown.
        """
        doing = self.main.doing
        seconds = self._still_s()
        if pending := self.pending_p2p():
            words = ", ".join(words for words, _ in pending[:SHOWN])
            return CollectiveWait(
                doing, seconds, sorted({rank for _, rank in pending}), under_way=words
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
        """Return the seconds since the main thread's last new action or collective."""
        since = self.main.since if self.main.since < math.inf else 0.0
        return time.monotonic() - max(since, self._changed)

    def _record(self, waits: Sequence[CollectiveWait]) -> Record:
        """Build this rank's heartbeat; of its waits it names the longest."""
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
            **({} if self.marks is None else graph_counts(self.marks, self.groups)),
        }
        if not waits:
            return Record(main, saving, counts)
        finding = self._finding(waits[0])
        return Record(
            main,
            saving,
            counts,
            waits=f"the work behind {waits[0].name}" if finding.words == LEFT else waits[0].name,
            during=waits[0].during if waits[0].in_graph else "",
            missing=finding.missing,
            excuse=finding.excuse,
        )

    def _busy(self) -> str:
        """Return how the main thread works; "" while it only spins for a device in a collective."""
        waits = self.spins and (
            self._under_way(self.main) or self.pending_p2p() or self._in_graph() is not None
        )
        return "" if waits and self._works == COMPUTING else self._works

    def _ask(self, heartbeats: Heartbeats, wait: CollectiveWait) -> Finding | None:
        """Return who is missing in an operation; None if not known yet."""
        unseen = wait.collective is None or wait.collective.group in (MEETINGS, REPLAYS)
        unseen = unseen or wait.beside
        look = Look(heartbeats, wait, self.timeout_s, complete=self.spins and not unseen)
        if wait.key is None:
            return look.find()
        return heartbeats.share(wait.key, look.find, SILENT * self.timeout_s)

    def verdict(self) -> str | None:
        """Return the report of a stuck rank, or None."""
        for wait in self.waits():
            if wait.seconds <= SAYS * self.timeout_s:
                return None
            if wait.beside and not self._finding(wait).missing:
                continue  # it may be over
            if (whom := self._whom(wait)) is not None:
                limit = f"schedule.timeout_s={self.timeout_s:g}"
                under_way = wait.under_way and f"; under way: {wait.under_way}"
                stuck = f"rank {self.rank} is stuck in {wait} for {wait.seconds:.0f} s ({limit})"
                return f"{stuck}{under_way}{whom}"
            if wait.beside:
                return None  # justified, and so is what the device does meanwhile
        return None

    def _whom(self, wait: CollectiveWait) -> str | None:
        """Describe the ranks that it waits for in vain; None if the wait is justified."""
        if self.heartbeats is None or not wait.ranks:
            return ""
        if self._unanswered * self.look_s > SILENT * self.timeout_s:
            return f"; {SILENCE}"
        finding = self._findings.get(wait.name)
        return None if finding is None or finding.excuse is not None else f"; {finding.words}"
