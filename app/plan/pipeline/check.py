"""Proof, before any process starts, that lowered lists run: no deadlock, no use before arrival."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from app.plan.actions import (
    Action,
    Backward,
    BackwardWeight,
    Compute,
    Exchange,
    Free,
    GatherParams,
    P2POp,
    ReduceGrads,
    Wait,
)
from app.plan.dependencies import (
    Made,
    Pipeline,
    excerpt,
    expect_finished,
    is_backward,
    pipeline_of,
    take_turns,
)


def check(
    lists: Sequence[Sequence[Action]], schedule: Sequence[Sequence[Compute]], v_shape: bool = False
) -> None:
    """Replay all ranks' lists.

    An exchange blocks until all its operations have met their other side. Lists that pass also run
    with non-blocking exchanges, since every action then only starts earlier. v_shape: see Pipeline.

    Raises ValueError, with the rank and a pointer into its list, if
    - ranks wait for each other in a circle, or two of them move tensors in different orders;
    - compute is not that of schedule[rank] (see build_schedule), or starts before its input has
      been waited for;
    - a tensor is sent before it is computed; or an operation is started or waited for never, twice
      or too early;
    - a sent output is freed never, twice, before its send is complete, or after its backward;
    - a chunk's parameters are not gathered once and before use, or its gradients not reduced once
      and when complete.
    """
    if len(lists) != len(schedule):
        raise ValueError(f"{len(lists)} lists, but the schedule has {len(schedule)} pipeline ranks")
    pipeline = pipeline_of(schedule, v_shape)
    wires = _Wires(pipeline)
    sides = _sides(schedule, pipeline)
    ranks = [
        _Rank(rank, pipeline, computes, sides=sides[rank]) for rank, computes in enumerate(schedule)
    ]

    def advance(rank: int, item: tuple[int, Action]) -> bool:
        place, action = item
        if rank not in wires.meeting:
            _refuse(ranks[rank].run(action), rank, lists[rank], place=place)
        return not isinstance(action, Exchange) or wires.meet(rank, action)

    expect_finished(lists, take_turns([list(enumerate(actions)) for actions in lists], advance))
    for rank, actions in enumerate(lists):
        _refuse(ranks[rank].left(), rank, actions, place=len(actions))


def _sides(schedule: Sequence[Sequence[Compute]], pipeline: Pipeline) -> list[set[P2POp]]:
    """Return, per rank, the operations that move what the schedule computes."""
    sides: list[set[P2POp]] = [set() for _ in schedule]
    for rank, actions in enumerate(schedule):
        for action in actions:
            for side, op in pipeline.sides(pipeline.makes(rank, action)):
                sides[side].add(op)
    return sides


def _refuse(faults: Iterator[str], rank: int, actions: Sequence[Action], place: int) -> None:
    for fault in faults:
        raise ValueError(f"rank {rank}: {fault}: {excerpt(actions, place)}")


class _Wires:
    """Tensors between each two ranks, in the order in which either side lists them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        # rank -> operations of its exchange that have not met their other side
        self.meeting: dict[int, int] = {}
        # (sender, receiver, whether the sender lists it) -> tensors that have not met
        self.listed: defaultdict[tuple[int, int, bool], deque[Made]] = defaultdict(deque)

    def meet(self, rank: int, exchange: Exchange) -> bool:
        """Return whether all operations of this rank's exchange have met their other side."""
        if rank not in self.meeting:
            self.meeting[rank] = len(exchange.ops)
            for op in exchange.ops:
                source, target = (rank, op.peer) if op.send else (op.peer, rank)
                self.listed[source, target, op.send].append(self.pipeline.moved(rank, op))
                self._match(source, target)
        if self.meeting[rank]:
            return False
        del self.meeting[rank]
        return True

    def _match(self, source: int, target: int) -> None:
        sent = self.listed[source, target, True]
        expected = self.listed[source, target, False]
        if sent and expected:
            if sent[0] != expected[0]:
                names = [
                    f"{letter}{mb} of stage {stage}" for letter, mb, stage in (sent[0], expected[0])
                ]
                raise ValueError(
                    f"different orders: rank {source} sends {names[0]} while rank {target} "
                    f"expects {names[1]}"
                )
            sent.popleft(), expected.popleft()
            self.meeting[source] -= 1
            self.meeting[target] -= 1


class _Rank:
    """Actions that one rank has run, and the faults of the next one."""

    def __init__(
        self, rank: int, pipeline: Pipeline, schedule: Sequence[Compute], sides: set[P2POp]
    ) -> None:
        self.rank = rank
        self.pipeline = pipeline
        self.schedule = schedule
        self.sides = sides
        self.made: set[Made] = set()
        self.started: set[P2POp] = set()
        self.waited: set[P2POp] = set()
        self.moved: set[Made] = set()  # received or sent, and waited for
        self.freed: set[tuple[int, int]] = set()
        self.gathered: set[int] = set()
        self.reduced: set[int] = set()
        self.sent = {(op.mb, op.chunk) for op in sides if op.send and op.flow == "F"}
        self.to_reduce = {
            action.chunk for action in schedule if isinstance(action, Backward | BackwardWeight)
        }

    def run(self, action: Action) -> Iterator[str]:
        """Yield the faults of running `action` now; it has run if there are none."""
        match action:
            case Compute():
                yield from self._compute_faults(action)
                self.made.add(self.pipeline.makes(self.rank, action))
            case Exchange(ops) | Wait(ops) if len(ops) != 1 and len(set(ops)) < max(len(ops), 1):
                yield "lists an operation twice, or none"
            case Exchange(ops):
                yield from (fault for op in ops for fault in self._start_faults(op))
                self.started.update(ops)
            case Wait(ops):
                yield from (
                    f"{op} is not under way"
                    for op in ops
                    if op not in self.started or op in self.waited
                )
                self.waited.update(ops)
                self.moved.update(self.pipeline.moved(self.rank, op) for op in ops)
            case Free(mb, chunk):
                yield from self._free_faults(mb, chunk)
                self.freed.add((mb, chunk))
            case GatherParams(chunk):
                if chunk in self.gathered:
                    yield "gathered twice"
                self.gathered.add(chunk)
            case ReduceGrads(chunk):
                yield from self._reduce_faults(chunk)
                self.reduced.add(chunk)

    def _compute_faults(self, action: Compute) -> Iterator[str]:
        scheduled = self.schedule[len(self.made) : len(self.made) + 1]
        if [action] != list(scheduled):
            yield f"the schedule has {scheduled[0] if scheduled else 'nothing more'}"
        if action.chunk not in self.gathered:
            yield "its parameters are not gathered"
        if not all(
            need in self.made or need in self.moved
            for need in self.pipeline.needs(self.rank, action)
        ):
            yield "its input is not there"
        key = action.mb, action.chunk
        if is_backward(action) and key in self.sent and key not in self.freed:
            yield "its output is not freed"

    def _start_faults(self, op: P2POp) -> Iterator[str]:
        if op not in self.sides:
            yield f"no other rank has a side of {op}"
        if op in self.started:
            yield f"{op} is started twice"
        if op.send and self.pipeline.moved(self.rank, op) not in self.made:
            yield f"{op} is sent before it is made"

    def _free_faults(self, mb: int, chunk: int) -> Iterator[str]:
        if (mb, chunk) not in self.sent or (
            "F",
            mb,
            self.pipeline.stage(self.rank, chunk),
        ) not in self.moved:
            yield "its output has not left yet"
        if (mb, chunk) in self.freed:
            yield "freed twice"

    def _reduce_faults(self, chunk: int) -> Iterator[str]:
        if chunk in self.reduced:
            yield "reduced twice"
        if chunk not in self.to_reduce or any(
            action.chunk == chunk for action in self.schedule[len(self.made) :]
        ):
            yield "its gradients are not complete"

    def left(self) -> Iterator[str]:
        """Yield what is missing at the end of the list."""
        if len(self.made) < len(self.schedule):
            yield f"the schedule continues with {self.schedule[len(self.made)]}"
        yield from (f"{op} is never waited for" for op in self.started - self.waited)
        yield from (f"output F{mb}.{chunk} is never freed" for mb, chunk in self.sent - self.freed)
        yield from (
            f"gradients of chunk {chunk} are never reduced"
            for chunk in self.to_reduce - self.reduced
        )
