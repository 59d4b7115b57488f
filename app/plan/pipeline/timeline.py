"""Start and end of each action of each rank, for given times of forward, backward and sending."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.plan.actions import Action, Compute, Exchange, P2POp, Wait
from app.plan.dependencies import Made, Pipeline, expect_finished, pipeline_of, take_turns
from app.plan.pipeline.order import LETTERS, ComputeOrder, Span
from app.plan.schedule import peak_in_flight

# one number for every stage, or one for each, in the order in which a microbatch passes
PerStage = float | tuple[float, ...]
EndTimes = Mapping[Made, float]  # output -> time at which it is computed


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one action on one microbatch and stage, in any common unit."""

    forward: PerStage = 1.0
    backward: PerStage = 2.0  # full backward, both parts
    # weight gradients' part of backward; None: half
    weight: PerStage | None = None
    send: float = 0.0  # moving one tensor to another rank

    def in_order(self, num_stages: int) -> list[float]:
        """Return times by letter and stage, as `ComputeOrder` takes them.

        ValueError as in `by_letter`.
        """
        found = self.by_letter(num_stages)
        return [seconds for letter in LETTERS for seconds in found[letter]]

    def by_letter(self, num_stages: int) -> dict[str, tuple[float, ...]]:
        """Return times of every stage by letter of the action.

        Raises ValueError for tuples that do not have num_stages entries.
        """
        forward = _each(self.forward, num_stages)
        whole = _each(self.backward, num_stages)
        weight = tuple(time / 2 for time in whole)
        if self.weight is not None:
            weight = _each(self.weight, num_stages)
        rest = tuple(both - part for both, part in zip(whole, weight, strict=True))
        return {"F": forward, "B": whole, "I": rest, "W": weight}


def _each(time: PerStage, num_stages: int) -> tuple[float, ...]:
    times = time if isinstance(time, tuple) else (time,) * num_stages
    if len(times) != num_stages:
        raise ValueError(f"{len(times)} times, one per stage, for {num_stages} stages")
    return times


@dataclass(frozen=True, slots=True)
class Event:
    """An action with its start and end; an exchange runs beside the compute that follows it."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timeline of a step on all pipeline ranks."""

    events: tuple[tuple[Event, ...], ...]  # [pipeline rank], in the order of its list
    # per rank: most microbatches in flight, counted per chunk
    peak_in_flight: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the step to the end of the last action."""
        return max((event.end for events in self.events for event in events), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they do not compute."""
        busy = sum(
            event.end - event.start
            for events in self.events
            for event in events
            if isinstance(event.action, Compute)
        )
        return 1 - busy / (len(self.events) * self.makespan) if busy else 0.0


def simulate(
    lists: Sequence[Sequence[Action]], times: Times | None = None, v_shape: bool = False
) -> Timeline:
    """Return the timeline of a step in which every rank runs lists[rank] as early as it can.

    Compute waits for its inputs and takes `times`. With exchanges in the lists, those of a rank run
    one after the other, beside its compute; each starts at its place in the list and ends when all
    its tensors have moved, each of which starts moving when both sides have started; such lists
    must pass `check`. Without exchanges, an output of another rank arrives `send` after it is
    computed. v_shape: see Pipeline.

    Raises ValueError if the lists wait for each other in a circle, or `times` are for another
    number of stages.
    """
    computes = [[action for action in actions if isinstance(action, Compute)] for actions in lists]
    if sum(map(len, computes)) == sum(map(len, lists)):
        return ordered_timeline(computes, ComputeOrder.of(computes, v_shape), times or Times())
    run = _run(lists, pipeline_of(lists, v_shape), times or Times())
    return _timeline(lists, run.spans)


def ordered_timeline(
    lists: Sequence[Sequence[Compute]], order: ComputeOrder, times: Times
) -> Timeline:
    """Return the timeline of compute lists whose order is known.

    Raises ValueError for `times` of another number of stages.
    """
    spans: list[list[Span]] = [[] for _ in lists]
    for rank, span in order.spans(times.in_order(order.pipeline.last + 1), times.send):
        spans[rank].append(span)
    return _timeline(lists, spans)


def _timeline(lists: Sequence[Sequence[Action]], spans: Sequence[Sequence[Span]]) -> Timeline:
    events = (
        tuple(Event(action, *span) for action, span in zip(actions, of_rank, strict=True))
        for actions, of_rank in zip(lists, spans, strict=True)
    )
    return Timeline(tuple(events), tuple(map(peak_in_flight, lists)))


def compute_end_times(lists: Sequence[Sequence[Compute]], v_shape: bool, times: Times) -> EndTimes:
    """Return when every output is computed if each rank runs as early as it can.

    ValueError as in `simulate`.
    """
    order = ComputeOrder.of(lists, v_shape)
    spans = order.spans(times.in_order(order.pipeline.last + 1), times.send)
    return {made: end for made, (_, (_, end)) in zip(order.made, spans, strict=True)}


def _run(lists: Sequence[Sequence[Action]], pipeline: Pipeline, times: Times) -> _Run:
    run = _Run(lists, pipeline, times)
    places = take_turns([list(enumerate(actions)) for actions in lists], run.advance)
    expect_finished(
        lists,
        [
            queue[0].place if queue else place
            for queue, place in zip(run.queues, places, strict=True)
        ],
    )
    return run


@dataclass(slots=True)
class _Posted:
    """An exchange that its rank has posted and that has not ended."""

    rank: int
    place: int  # in the rank's list
    ops: tuple[P2POp, ...]
    start: float  # when it was posted, then when it started
    ready: float  # latest start of the other sides that it has met
    missing: int  # operations that have not met their other side


class _Run:
    """State of a simulated step."""

    def __init__(self, lists: Sequence[Sequence[Action]], pipeline: Pipeline, times: Times) -> None:
        self.pipeline = pipeline
        self.send = times.send
        self.times = times.by_letter(pipeline.last + 1)
        self.now = [0.0] * pipeline.pp  # per rank: end of its last action
        self.made: dict[Made, float] = {}  # when
        # [rank][position in its list]: start and end
        self.spans = [[(0.0, 0.0)] * len(actions) for actions in lists]
        self.queues: list[deque[_Posted]] = [deque() for _ in lists]
        self.free = [0.0] * pipeline.pp  # per rank: end of its last finished exchange
        # started exchanges, by the output that they wait to move
        self.unmet: dict[Made, _Posted] = {}
        self.ended: list[dict[P2POp, float]] = [{} for _ in lists]  # per rank

    def advance(self, rank: int, item: tuple[int, Action]) -> bool:
        """Run the action at this position; return False if its inputs are not there yet."""
        place, action = item
        start = end = self.now[rank]
        match action:
            case Exchange(ops):
                self.queues[rank].append(
                    _Posted(rank, place, ops, start=start, ready=0.0, missing=len(ops))
                )
                if len(self.queues[rank]) == 1:
                    self._start(self.queues[rank][0])
                return True
            case Wait(ops):
                ended = self.ended[rank]
                if not all(op in ended for op in ops):
                    return False
                end = max([start, *(ended[op] for op in ops)])
            case Compute():
                needs = self.pipeline.needs(rank, action)
                if not all(need in self.made for need in needs):
                    return False
                made = self.pipeline.makes(rank, action)
                start = max([start, *(self._arrival(need, rank) for need in needs)])
                end = self.made[made] = start + self.times[action.letter][made[2]]
        self.now[rank], self.spans[rank][place] = end, (start, end)
        return True

    def _arrival(self, need: Made, rank: int) -> float:
        return self.made[need] + (self.send if self.pipeline.rank(need[2]) != rank else 0.0)

    def _start(self, posted: _Posted) -> None:
        """Start the first exchange in a rank's queue.

        End those that waited only for it, and start what these held up.
        """
        starting = [posted]
        while starting:
            posted = starting.pop()
            posted.start = max(posted.start, self.free[posted.rank])
            for op in posted.ops:
                made = self.pipeline.moved(posted.rank, op)
                other = self.unmet.pop(made, None)
                if other is None:
                    self.unmet[made] = posted
                    continue
                for one, side in ((posted, other), (other, posted)):
                    one.ready = max(one.ready, side.start)
                    one.missing = one.missing - 1
                starting += self._end(other)
            starting += self._end(posted)

    def _end(self, posted: _Posted) -> list[_Posted]:
        """End an exchange if nothing of it is missing; return the exchanges that can start then."""
        if posted.missing:
            return []
        rank = posted.rank
        queue = self.queues[posted.rank]
        queue.popleft()
        end = self.free[rank] = max(posted.start, posted.ready) + self.send
        self.spans[rank][posted.place] = posted.start, end
        self.ended[rank].update(dict.fromkeys(posted.ops, end))
        return [queue[0]] if queue else []
