"""Marks in captured graphs: places of a step that each replay reports to host memory.

Neither the host nor torch's flight recorders see what the device does within a replay. So a graph
that is recorded with `Marks.recording` counts its replays on the device, and writes that count to
pinned host memory at each mark: at its start and end, at every action, phase of a layer and
collective, and before it waits for pipeline P2P. A place with an older count than the start has not
been reached yet. A mark is one kernel that writes 4 bytes, on the stream of the work behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.engine.watchdog.activity import ThreadActivity
from app.kernels.mark import write_mark

ROOM = 65_536  # marks of one block of host memory, 256 KiB
LEAST = 16_384  # marks that it has left when a recording begins
LAUNCHES = 1_024  # newest replays of a graph whose actions are known
# torch's operations -> their names in `torch.distributed`
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
}


@dataclass(frozen=True, slots=True)
class Mark:
    """Place within a graph."""

    action: str  # note of the main thread when it was recorded
    place: str = ""  # layer and phase; empty outside of layers
    operation: str = ""  # collective that begins here; empty for none
    group: str = ""  # torch's name of its group
    ranks: tuple[int, ...] = ()  # global ranks that the device may wait for here
    beside: bool = False  # True if the collective runs beside the work behind it
    under_way: str = ""  # sends and receives that the device waits for


@dataclass(frozen=True, slots=True)
class Position:
    """Place of a device within a replay."""

    mark: Mark  # the last one that it has passed
    following: Mark | None  # the next one; None at the end of the graph
    action: str  # of this replay
    beside: tuple[Mark, ...]  # by group, the newest collective of this replay that runs beside

    def __str__(self) -> str:
        """Return action, layer and phase."""
        return _words(self.action, self.mark.place)

    @property
    def next_words(self) -> str:
        """Describe the next place, as far as it differs."""
        if self.following is None:
            return "its end"
        action = self.following.action if self.mark.action != self.following.action else ""
        place = _words(action, self.following.place)
        return ", ".join(each for each in (self.following.operation, place) if each)


@dataclass(slots=True)
class MarkedGraph:
    """Marks of one graph; the n-th one writes to the n-th of its slots."""

    counter: Tensor  # replays begun, int32 scalar on the device
    slots: Tensor  # count of replays when each was passed, int32 in host memory
    launched_in: str  # note of the main thread when it was recorded
    marks: list[Mark] = field(default_factory=list)
    # notes of the main thread at the newest launches, and the number of all
    launches: deque[str] = field(default_factory=lambda: deque(maxlen=LAUNCHES))
    launched: int = 0
    recorded: bool = False
    _next: int = 0

    def begin(self, mark: Mark) -> None:
        """Count a replay and pass its first mark."""
        self._next = 0
        with torch.no_grad():
            self.counter.add_(1)
        self.put(mark)

    def put(self, mark: Mark, last: bool = False) -> None:
        """Pass a mark; it is left out if there is no room. The CPU stand-in reruns it as it was."""
        if not self.recorded:
            if len(self.marks) >= len(self.slots) - (not last):
                return
            self.marks.append(mark)
        elif self._next >= len(self.marks) - (not last):
            return
        with torch.no_grad():
            write_mark(self.slots, self._next, self.counter)
        self._next += 1

    def launch(self, doing: str) -> None:
        """Note on the host that it is launched once more."""
        self.launches.append(doing)
        self.launched += 1

    def passed(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the number of times that each mark was passed."""
        return self.slots[: len(self.marks)].numpy()

    def position(self) -> Position | None:
        """Return where the device is; None if it is not in this graph."""
        if not self.recorded:
            return None
        passed = self.passed().copy()  # it changes meanwhile
        if passed[0] <= passed[-1]:
            return None
        following = int(np.argmax(passed < passed[0]))
        mark = self.marks[following - 1]
        beside = {each.group: each for each in self.marks[:following] if each.beside}
        return Position(
            mark,
            self.marks[following] if following < len(self.marks) - 1 else None,
            self._action(mark, int(passed[0])),
            beside=tuple(beside.values()),
        )

    def _action(self, mark: Mark, replay: int) -> str:
        """Return the action: within it a full iteration notes its own, partial graphs none."""
        place = len(self.launches) - 1 - (self.launched - replay)
        if mark.action != self.launched_in or not 0 <= place < len(self.launches):
            return mark.action
        return self.launches[place]


@dataclass(slots=True)
class Marks:
    """Marks of all graphs of a rank. `activity` is what the main thread notes."""

    device: torch.device
    activity: ThreadActivity
    graphs: list[MarkedGraph] = field(default_factory=list)  # also those released since
    current: MarkedGraph | None = None  # being recorded, or rerun by the CPU stand-in
    _room: Tensor | None = None  # host memory not used yet
    _blocks: list[Tensor] = field(default_factory=list)
    _place: tuple[str, str] = ("", "")  # action, and the layer and phase that it is in

    def new_graph(self) -> MarkedGraph:
        """Take memory for a graph that is about to be recorded: none can be taken during that."""
        if self._room is None or len(self._room) < LEAST:
            pinned = self.device.type == "cuda"
            self._room = torch.zeros(ROOM, dtype=torch.int32, pin_memory=pinned)
            self._blocks.append(self._room)
        counter = torch.zeros((), dtype=torch.int32, device=self.device)
        write_mark(self._room, 0, counter)  # compiled now, not while it is recorded
        return MarkedGraph(counter, self._room, launched_in=self.activity.doing)

    def recorded(self, graph: MarkedGraph) -> None:
        """Keep a graph whose recording has succeeded."""
        assert self._room is not None, "taken for it"
        self._room = self._room[len(graph.marks) :]
        self.graphs.append(graph)

    @contextmanager
    def recording(self, graph: MarkedGraph) -> Iterator[None]:
        """Put marks into the graph while the block runs."""
        self.current = graph
        try:
            with _MarksCollectives(self):
                graph.begin(Mark(self.activity.doing))
                yield
                graph.put(Mark("the end"), last=True)
            graph.recorded = True
        finally:
            self.current = None

    def act(self) -> None:
        """Mark the beginning of the action that the main thread has noted."""
        if self.current is not None:
            self.current.put(Mark(self.activity.doing))

    def enter(self, place: str) -> None:
        """Mark the beginning of a phase of a layer, or of its backward."""
        if self.current is not None:
            self.move(place)
            self.current.put(Mark(self.activity.doing, place))

    def move(self, place: str) -> str:
        """Set the place within this action without a mark; returns the one before."""
        before, self._place = self.place, (self.activity.doing, place)
        return before

    @property
    def place(self) -> str:
        """Layer and phase that the present action is in; empty outside."""
        return self._place[1] if self._place[0] == self.activity.doing else ""

    def collective(self, operation: str, group: dist.ProcessGroup, beside: bool) -> None:
        """Mark the beginning of a collective."""
        if self.current is not None and group.size() > 1:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.current.put(
                Mark(
                    self.activity.doing,
                    self.place,
                    operation,
                    group=group.group_name,
                    ranks=ranks,
                    beside=beside,
                )
            )

    def waits_for(self, named: Sequence[tuple[str, int]]) -> None:
        """Mark a wait for sends and receives: (description, rank at the other end) of each."""
        if self.current is not None:
            ranks = tuple(sorted({rank for _, rank in named}))
            words = ", ".join(words for words, _ in named)
            self.current.put(Mark(self.activity.doing, ranks=ranks, under_way=words))

    def position(self) -> Position | None:
        """Return where this rank's device is; None if it is in no graph."""
        return next((place for graph in self.graphs if (place := graph.position())), None)

    def passed(self) -> int:
        """Return the number of marks passed so far."""
        return sum(int(block.numpy().sum(dtype=np.int64)) for block in self._blocks)

    def entered(self) -> Mapping[str, int]:
        """Return the collectives begun so far within graphs, by torch's name of the group."""
        counts = Counter[str]()
        for graph in self.graphs:
            for mark, passed in zip(graph.marks, graph.passed().tolist(), strict=True):
                if mark.group:
                    counts[mark.group] += passed
        return counts


class SeesCollectives(TorchDispatchMode):
    """Mode that shows each collective to `around`, also in autograd's threads, which inherit it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch

    def around(
        self,
        operation: str,
        group: dist.ProcessGroup,
        values: Mapping[str, Any],
        call: Callable[[], Any],
    ) -> Any:
        """Run `call`, a collective of a group with these arguments by name; return its result."""
        raise NotImplementedError

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions run as they would without it."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation of torch."""
        given = kwargs or {}
        call: Callable[[], Any] = partial(func, *args, **given)
        operation = None
        if func.namespace == "c10d":
            operation = COLLECTIVES.get(func._schema.name.partition("::")[2])
        if operation is None:
            return call()
        names = (argument.name for argument in func._schema.arguments)
        values = {**dict(zip(names, args, strict=False)), **given}
        group = dist.ProcessGroup.unbox(values["process_group"])
        return self.around(operation, group, values, call)


class _MarksCollectives(SeesCollectives):
    """Marks collectives as they are called."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.marks = marks

    def around(
        self,
        operation: str,
        group: dist.ProcessGroup,
        values: Mapping[str, Any],
        call: Callable[[], Any],
    ) -> Any:
        """Mark the collective, then run it."""
        self.marks.collective(operation, group, beside=values.get("async_op", True))
        return call()


def _words(action: str, place: str) -> str:
    return ", ".join(each for each in (action, place) if each)
