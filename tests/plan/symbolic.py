"""Runs lowered lists of all ranks on symbols instead of tensors, the way an executor would: a match
and local dictionaries.

What a stage puts out for a microbatch is (mb, 0, 1, …, stage); a gradient starts from the last
output: (…, last, last, …, stage).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Exchange,
    Forward,
    Free,
    GatherParams,
    P2POp,
    ReduceGrads,
    Wait,
)
from app.plan.dependencies import take_turns

Symbol = tuple[int, ...]
Key = tuple[str, int, int]  # flow, microbatch, chunk
Wires = defaultdict[tuple[int, int], list[Symbol]]  # (from, to) -> what was sent, in order


def run(
    lists: Sequence[Sequence[Action]], num_chunks: int, v_shape: bool = False
) -> dict[int, list[Symbol]]:
    """Per stage, the gradients that its weights sum up, in order; AssertionError or KeyError if
    a list cannot run.
    """
    pp, wires, training = len(lists), Wires(list), any(map(is_backward, lists[0]))
    stages = [
        [rank, 2 * pp - 1 - rank] if v_shape else list(range(rank, pp * num_chunks, pp))
        for rank in range(pp)
    ]
    ranks = [
        Rank(rank, stages[rank], pp * num_chunks - 1, wires=wires, training=training)
        for rank in range(pp)
    ]
    places = take_turns(lists, lambda rank, action: ranks[rank].run(action))
    assert places == [len(actions) for actions in lists], "stuck"
    for rank in ranks:
        assert not (rank.live or rank.came or rank.going or rank.queued or rank.expected), (
            "left over"
        )
    return {stage: sums for rank in ranks for stage, sums in rank.sums.items()}


def is_backward(action: Action) -> bool:
    return isinstance(action, Backward | BackwardInput)


class Rank:
    def __init__(
        self, rank: int, stages: list[int], last: int, wires: Wires, training: bool
    ) -> None:
        # stages: [chunk]
        self.rank, self.stages, self.last, self.wires, self.training = (
            rank,
            stages,
            last,
            wires,
            training,
        )
        self.gathered: set[int] = set()
        self.live: dict[tuple[int, int], Symbol] = {}  # outputs whose backward is to come
        # received, or handed over by the neighbouring stage on this rank
        self.came: dict[Key, Symbol] = {}
        self.going: dict[Key, Symbol] = {}  # to be sent, or on its way
        self.queued: dict[tuple[int, int], Symbol] = {}  # gradients that wait for their weight part
        self.expected: dict[P2POp, int] = {}  # position on the wire from the peer
        self.listed: Counter[int] = Counter()  # operations expected from each peer so far
        self.sums: defaultdict[int, list[Symbol]] = defaultdict(list)

    def run(self, action: Action) -> bool:
        """False while what the action waits for is not there."""
        match action:
            case Compute():
                self.compute(action, self.stages[action.chunk])
            case Exchange(ops):
                for op in ops:
                    self.start(op)
            case Wait(ops):
                return self.wait(ops)
            case Free(mb, chunk):
                del self.going["F", mb, chunk]
            case GatherParams(chunk):
                self.gathered.add(chunk)
            case ReduceGrads(chunk):
                self.sums[self.stages[chunk]].append(("reduced",))
        return True

    def compute(self, action: Compute, stage: int) -> None:
        mb, chunk = key = action.mb, action.chunk
        assert chunk in self.gathered
        match action:
            case Forward():
                out = (*(self.came.pop(("F", *key)) if stage else (mb,)), stage)
                self.live.update({key: out} if self.training else {})
                self.hand_on("F", mb, stage + 1, chunk=chunk, symbol=out)
            case BackwardWeight():
                self.sums[stage].append(self.queued.pop(key))
            case _:
                assert ("F", *key) not in self.going, "the output is not freed"
                out = self.live.pop(key)
                gradient = (*(self.came.pop(("B", *key)) if stage < self.last else out), stage)
                self.hand_on("B", mb, stage - 1, chunk=chunk, symbol=gradient)
                if isinstance(action, BackwardInput):
                    self.queued[key] = gradient
                else:
                    self.sums[stage].append(gradient)

    def hand_on(self, flow: str, mb: int, to: int, chunk: int, symbol: Symbol) -> None:
        """Pass the output of a chunk on to stage `to`."""
        if to in self.stages:
            self.came[flow, mb, self.stages.index(to)] = symbol
        elif 0 <= to <= self.last:
            self.going[flow, mb, chunk] = symbol

    def start(self, op: P2POp) -> None:
        if op.send:
            self.wires[self.rank, op.peer].append(self.going[op.flow, op.mb, op.chunk])
        else:
            self.expected[op] = self.listed[op.peer]
            self.listed[op.peer] += 1

    def wait(self, ops: Sequence[P2POp]) -> bool:
        receives = [op for op in ops if not op.send]
        if any(len(self.wires[op.peer, self.rank]) <= self.expected[op] for op in receives):
            return False
        for op in receives:
            self.came[op.flow, op.mb, op.chunk] = self.wires[op.peer, self.rank][
                self.expected.pop(op)
            ]
        for op in ops:
            if op.send and op.flow == "B":
                del self.going["B", op.mb, op.chunk]
        return True
