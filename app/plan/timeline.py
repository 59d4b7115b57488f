"""When each action of each rank starts and ends, for given times of forward, backward and sending."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from app.plan.replay import Made, Pipeline, expect_finished, pipeline_of, take_turns
from app.plan.schedule import Action, Compute, Exchange, Op, Wait, peak_in_flight


@dataclass(frozen=True, slots=True)
class Times:
    """How long one action on one microbatch and one chunk takes, in any unit."""

    forward: float = 1.0
    backward: float = 2.0  # both parts
    weight: float | None = None  # the part of backward that yields the gradients of weights; None: half
    send: float = 0.0  # moving one tensor to another rank

    def of(self, action: Compute) -> float:
        """Time of this kind of action."""
        weight = self.backward / 2 if self.weight is None else self.weight
        return {"F": self.forward, "B": self.backward, "I": self.backward - weight, "W": weight}[action.letter]


@dataclass(frozen=True, slots=True)
class Event:
    """An action and when it ran; an exchange runs beside the compute that follows it."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A whole step."""

    events: tuple[tuple[Event, ...], ...]  # [pipeline rank], in the order of its list
    peak_in_flight: tuple[int, ...]  # per rank: most microbatches, counted per chunk, that wait for their backward

    @property
    def makespan(self) -> float:
        """From the start of the step to the end of the last action."""
        return max((event.end for events in self.events for event in events), default=0.0)

    @property
    def bubble_fraction(self) -> float:
        """Part of all ranks' time in which they do not compute."""
        busy = sum(event.end - event.start for events in self.events for event in events if isinstance(event.action, Compute))
        return 1 - busy / (len(self.events) * self.makespan) if busy else 0.0


def simulate(lists: Sequence[Sequence[Action]], times: Times | None = None) -> Timeline:
    """The step that results when every rank runs its list, lists[rank], as early as it can.

    Compute waits for what it needs, and takes `times`. In lists with exchanges, those of a rank run one after the other,
    beside its compute; each starts when it stands in the list and ends when all its tensors have moved, which each does
    from when both sides have started. In lists without, what another rank makes arrives `send` after it is made.

    Raises ValueError if the lists wait for each other in a circle.
    """
    run = _Run(pipeline_of(lists), times or Times())
    expect_finished(lists, take_turns([list(enumerate(actions)) for actions in lists], run.advance))
    events = (tuple(Event(action, *run.spans[rank, place]) for place, action in enumerate(actions))
              for rank, actions in enumerate(lists))
    return Timeline(tuple(events), tuple(map(peak_in_flight, lists)))


class _Run:
    """A step under way."""

    def __init__(self, pipeline: Pipeline, times: Times) -> None:
        self.pipeline, self.times = pipeline, times
        self.now = [0.0] * pipeline.pp  # per rank: when it is done with what it has run so far
        self.made: dict[Made, float] = {}  # when
        self.spans: dict[tuple[int, int], tuple[float, float]] = {}  # (rank, position in its list) -> start and end
        self.queues: list[deque[tuple[int, Exchange, float]]] = [deque() for _ in self.now]  # position, exchange, when posted
        self.free = [0.0] * pipeline.pp  # per rank: end of its last finished exchange
        self.begun: defaultdict[Made, dict[int, float]] = defaultdict(dict)  # rank -> since when it is ready to move this
        self.ended: dict[tuple[int, Op], float] = {}

    def advance(self, rank: int, item: tuple[int, Action]) -> bool:
        """Run the action at this position, or return False if what it waits for has not happened yet."""
        place, action = item
        start = end = self.now[rank]
        match action:
            case Exchange():
                self.queues[rank].append((place, action, start))
                self._settle(rank)
                return True
            case Wait(ops):
                if not all((rank, op) in self.ended for op in ops):
                    return False
                end = max([start, *(self.ended[rank, op] for op in ops)])
            case Compute():
                needs = self.pipeline.needs(rank, action)
                if not self.made.keys() >= set(needs):
                    return False
                start = max([start, *(self._arrival(need, rank) for need in needs)])
                end = self.made[self.pipeline.makes(rank, action)] = start + self.times.of(action)
        self.now[rank], self.spans[rank, place] = end, (start, end)
        return True

    def _arrival(self, need: Made, rank: int) -> float:
        return self.made[need] + (self.times.send if need[2] % self.pipeline.pp != rank else 0.0)

    def _settle(self, rank: int) -> None:
        """Begin the first exchange in this rank's queue; finish it and what it was the last to hold up."""
        todo = [rank]
        while todo:
            rank = todo.pop()
            if not self.queues[rank]:
                continue
            place, exchange, posted = self.queues[rank][0]
            start = max(posted, self.free[rank])
            sides = [self.begun[self.pipeline.moved(rank, op)] for op in exchange.ops]
            todo += [op.peer for op, side in zip(exchange.ops, sides, strict=True) if rank not in side]
            for side in sides:
                side[rank] = start
            if all(len(side) == 2 for side in sides):
                end = self.free[rank] = max(max(side.values()) for side in sides) + self.times.send
                self.spans[rank, place] = start, end
                self.ended.update(((rank, op), end) for op in exchange.ops)
                self.queues[rank].popleft()
                todo.append(rank)
