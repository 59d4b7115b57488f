"""Inputs and outputs of actions, and the replay of all ranks' lists in turns.

An output is named by letter, microbatch and stage: ("F", mb, s) is the output of stage s, ("B", mb,
s) the gradient of its input, ("W", mb, s) the gradients of its weights if backward is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Flow,
    Forward,
    P2POp,
)

Made = tuple[str, int, int]  # letter, microbatch, stage
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Placement of stages on ranks.

    Chunk c of rank r is stage c·pp + r: every chunk goes up the ranks. In a V every other chunk
    goes down them, and chunk 1 of rank r is stage 2·pp − 1 − r. Rank 0 then has the first and the
    last stage, and stages pp − 1 and pp share a rank.
    """

    pp: int  # pipeline ranks
    num_chunks: int  # stages per rank
    v_shape: bool = False  # odd chunks go down the ranks

    @property
    def last(self) -> int:
        """Global number of the last stage."""
        return self.pp * self.num_chunks - 1

    def stage(self, rank: int, chunk: int) -> int:
        """Return the global number of a rank's chunk."""
        return chunk * self.pp + self._mirrored(rank, chunk)

    def rank(self, stage: int) -> int:
        """Return the rank that holds a stage, as its chunk stage // pp."""
        chunk, place = divmod(stage, self.pp)
        return self._mirrored(place, chunk)

    def _mirrored(self, rank: int, chunk: int) -> int:
        return self.pp - 1 - rank if self.v_shape and chunk % 2 else rank

    def makes(self, rank: int, action: Compute) -> Made:
        """Return the output of an action of `rank`.

        A full backward counts as the gradient of its input.
        """
        letter = "B" if isinstance(action, BackwardInput) else action.letter
        return letter, action.mb, self.stage(rank, action.chunk)

    def needs(self, rank: int, action: Compute) -> list[Made]:
        """Return the inputs of an action: outputs of neighbouring stages, and of its own earlier
        actions.
        """
        mb = action.mb
        stage = self.stage(rank, action.chunk)
        match action:
            case Forward():
                return [("F", mb, stage - 1)] if stage else []
            case BackwardWeight():
                return [("B", mb, stage)]
        return [("F", mb, stage), *([("B", mb, stage + 1)] if stage < self.last else [])]

    def sides(self, made: Made) -> Iterator[tuple[int, P2POp]]:
        """Yield (rank, operation) of sender and receiver.

        Nothing for an output that stays on its rank.
        """
        letter, mb, source = made
        target = {"F": source + 1, "B": source - 1}.get(letter, -1)
        if not 0 <= target <= self.last:
            return
        sender = self.rank(source)
        receiver = self.rank(target)
        if sender != receiver:
            flow: Flow = "F" if letter == "F" else "B"
            yield sender, P2POp(flow, mb, source // self.pp, peer=receiver, send=True)
            yield receiver, P2POp(flow, mb, target // self.pp, peer=sender, send=False)

    def moved(self, rank: int, op: P2POp) -> Made:
        """Return the output that an operation of `rank` moves."""
        stage = self.stage(rank, op.chunk)
        return op.flow, op.mb, stage if op.send else stage + (-1 if op.flow == "F" else 1)


def pipeline_of(lists: Sequence[Sequence[Action]], v_shape: bool = False) -> Pipeline:
    """Return the pipeline that lists[rank] belong to."""
    chunks = [
        action.chunk for actions in lists for action in actions if isinstance(action, Compute)
    ]
    return Pipeline(len(lists), max(chunks, default=0) + 1, v_shape)


def is_backward(action: Action) -> bool:
    """Return whether the action turns the gradient of a chunk's output into that of its input."""
    return isinstance(action, Backward | BackwardInput)


def take_turns(lists: Sequence[Sequence[Item]], advance: Callable[[int, Item], bool]) -> list[int]:
    """Run every rank's list in order until none can continue; result[rank] is where it stopped.

    `advance(rank, item)` runs the item, or returns False while it has to wait for another rank.
    """
    places = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, items in enumerate(lists):
            while places[rank] < len(items) and advance(rank, items[places[rank]]):
                places[rank] += 1
                moved = True
    return places


def expect_finished(lists: Sequence[Sequence[Action]], places: Sequence[int]) -> None:
    """Raise ValueError, naming the action at which each rank waits, for an unfinished list."""
    stops = enumerate(zip(lists, places, strict=True))
    waiting = [
        f"rank {rank} at {excerpt(actions, place)}"
        for rank, (actions, place) in stops
        if place < len(actions)
    ]
    if waiting:
        raise ValueError(f"stuck, each waiting for another: {'; '.join(waiting)}")


def excerpt(actions: Sequence[Action], place: int, around: int = 6) -> str:
    """Return a list with a pointer at one place: … B0.0 >>> F3.0 <<< B1.0 …"""
    before = actions[max(0, place - around) : place]
    after = actions[place + 1 : place + 1 + around]
    words = ["…"] * (place > around) + [
        *map(str, before),
        ">>>",
        *map(str, actions[place : place + 1]),
        "<<<",
        *map(str, after),
    ]
    return " ".join(words + ["…"] * (place + 1 + around < len(actions)))
