"""Numbers of microbatches and buffers that a pipeline rank holds during each of its actions.

A `Moment` is a snapshot of these live counts while an action runs. A walk along the rank's list
finds them; they do not depend on the sizes of microbatches. A forward leaves
saved activations, and an output that stays until it is freed, or until its backward if nothing
sends it. The memory of a receive exists from the exchange that starts it: hidden states become a
saved input in their forward; a gradient is dead after its backward. A gradient to be sent stays
until its send has been waited for. Between the two parts of a split backward only what weight
gradients need stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from app.plan.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Exchange,
    Forward,
    Free,
    MicrobatchChunk,
    OnMicrobatch,
    Wait,
)
from app.plan.recompute import spared_microbatches

# microbatches per chunk: [recomputed as usual, spared (`RecomputePolicy`)] of chunk 0, then of 1, …
Counts = tuple[int, ...]
# per chunk: whether hidden states (not tokens) come in, and whether they go out (not into the loss)
Borders = tuple[tuple[bool, bool], ...]


class Moment(NamedTuple):
    """Live memory while an action runs, in counts."""

    letter: str  # of the action
    place: int  # index of its microbatch's entry in the counts
    live: Counts  # from forward to backward, the action's own microbatch included
    waiting: Counts  # for the second part of a split backward
    buffers: int  # sent or received tensors between stages


@dataclass(frozen=True, slots=True)
class Walks:
    """Lowered lists of all pipeline ranks, paired with their live-memory counts.

    The counts are computed on first use.
    """

    actions: Sequence[Sequence[Action]]  # [pp_rank]
    found: dict[tuple[int, int, Borders], dict[Moment, str]] = field(default_factory=dict)

    def moments(self, pp_rank: int, partial: int, borders: Borders) -> dict[Moment, str]:
        """Return the distinct moments of a rank -> first action of each, in the list's order.

        `partial` as in `RecomputePolicy`.
        """
        key = pp_rank, partial, borders
        if key not in self.found:
            actions = self.actions[pp_rank]
            spared = spared_microbatches(actions, partial) if partial else frozenset()
            self.found[key] = moments_of(actions, spared, borders)
        return self.found[key]


def moments_of(
    actions: Sequence[Action], spared: frozenset[MicrobatchChunk], borders: Borders
) -> dict[Moment, str]:
    """Return the moments of one list; `spared`: microbatches in chunks that are recomputed less."""
    walk = _Walk(spared, borders, [0] * 2 * len(borders), [0] * 2 * len(borders))
    for action in actions:
        walk.take(action)
    return walk.seen


@dataclass(slots=True)
class _Walk:
    spared: frozenset[MicrobatchChunk]
    borders: Borders
    live: list[int]
    waiting: list[int]
    # buffers: name, microbatch, chunk
    buffers: set[tuple[str, int, int]] = field(default_factory=set)
    seen: dict[Moment, str] = field(default_factory=dict)

    def take(self, action: Any) -> None:
        """Apply what one action allocates and frees."""
        kind = type(action)  # a match takes three times as long
        if kind is Forward:
            self._forward(action, action.mb, action.chunk)
        elif kind is Backward or kind is BackwardInput:
            self._backward(action, action.mb, action.chunk)
        elif kind is BackwardWeight:
            self._weight(action)
        elif kind is Free:
            self._drop("output", action.mb, action.chunk)
        elif kind is Exchange or kind is Wait:
            self._move(action, waits=kind is Wait)

    def _place(self, mb: int, chunk: int) -> int:
        return 2 * chunk + ((mb, chunk) in self.spared)

    def _move(self, action: Any, waits: bool) -> None:
        """Allocate for a receive when it starts; free a sent gradient when its send is complete."""
        for op in action.ops:
            if waits and op.send and op.flow == "B":
                self._drop("gradient", op.mb, op.chunk)
            elif not waits and not op.send:
                self.buffers.add((f"in {op.flow}", op.mb, op.chunk))

    def _forward(self, action: OnMicrobatch, mb: int, chunk: int) -> None:
        takes, gives = self.borders[chunk]
        if not self._drop("in F", mb, chunk) and takes:
            self._drop("output", mb, chunk - 1)  # of the previous stage, on this rank too
        self.live[self._place(mb, chunk)] += 1
        self._see(action)
        if gives:
            self.buffers.add(("output", mb, chunk))

    def _backward(self, action: OnMicrobatch, mb: int, chunk: int) -> None:
        takes, gives = self.borders[chunk]
        place = self._place(mb, chunk)
        self._see(action)
        self.live[place] -= 1
        self.waiting[place] += isinstance(action, BackwardInput)
        if not self._drop("in B", mb, chunk) and gives:
            self._drop("gradient", mb, chunk + 1)  # of the next stage, on this rank too
        self._drop("output", mb, chunk)
        if takes:
            self.buffers.add(("gradient", mb, chunk))

    def _weight(self, action: OnMicrobatch) -> None:
        self._see(action)
        self.waiting[self._place(action.mb, action.chunk)] -= 1

    def _see(self, action: OnMicrobatch) -> None:
        """Record the moment, unless an equal one was seen before."""
        moment = Moment(
            action.letter,
            self._place(action.mb, action.chunk),
            tuple(self.live),
            tuple(self.waiting),
            buffers=len(self.buffers),
        )
        self.seen.setdefault(moment, str(action))

    def _drop(self, what: str, mb: int, chunk: int) -> bool:
        """Drop a buffer; return whether it was there."""
        there = (what, mb, chunk) in self.buffers
        self.buffers.discard((what, mb, chunk))
        return there
