"""When a pipeline rank holds most memory in a step, and what: a walk along its list of actions.

A forward leaves what autograd keeps, and an output that stays until it is freed, or until its
backward where nothing sends it. Memory of a receive is there from the exchange that starts it:
hidden states become kept input in their forward, a gradient is gone after its backward. A gradient
to be sent stays until its send has been waited for. Between the two parts of a split backward only
what gradients of weights need stays: the inputs of matrix products and the gradients of their
outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from app.plan.memory.activations import ChunkActivations, MicrobatchMemory
from app.plan.recompute import RankRecompute


@dataclass(frozen=True, slots=True)
class Peak:
    """What a rank holds when it holds most, in bytes."""

    kept: Mapping[str, int]  # phase -> by autograd
    waiting: int  # for gradients of weights
    buffers: int  # between stages
    working: int  # only while the action runs
    action: str
    in_flight: int  # microbatches with something kept, counted once per chunk
    pool_kept: int  # in partial graphs, when these hold most: kept for their own backward
    pool_cut: int  # and what crosses their border

    @property
    def total(self) -> int:
        """All of it that lies outside of graphs."""
        return sum(self.kept.values()) + self.waiting + self.buffers + self.working


def find_peak(
    actions: Sequence[Action],
    chunks: Sequence[ChunkActivations],
    recompute: RankRecompute,
) -> Peak:
    """The peak of a training step's list, some of which backward computes again."""
    walk = _Walk(chunks, recompute)
    for action in actions:
        walk.take(action)
    return walk.peak()


@dataclass(slots=True)
class _Walk:
    """What is alive at one action, and at the largest so far."""

    chunks: Sequence[ChunkActivations]
    recompute: RankRecompute
    kept: int = 0  # by autograd and for gradients of weights
    buffers: int = 0
    pool: int = 0  # in partial graphs
    live: dict[MicrobatchChunk, MicrobatchMemory] = field(default_factory=dict)
    waiting: dict[MicrobatchChunk, MicrobatchMemory] = field(default_factory=dict)
    # buffers: what it is, microbatch, chunk
    border: dict[tuple[str, int, int], int] = field(default_factory=dict)
    most: int = -1
    at_most: tuple[str, int, int, tuple[MicrobatchMemory, ...], int] = ("", 0, 0, (), 0)
    most_pool: int = -1
    at_most_pool: tuple[MicrobatchMemory, ...] = ()

    def take(self, action: Any) -> None:
        """Add and free what one action does; actions that hold no memory change nothing."""
        kind = type(action)  # a match takes three times as long
        if kind is Forward:
            self._forward(action, action.mb, action.chunk)
        elif kind is Backward or kind is BackwardInput:
            self._backward(action, action.mb, action.chunk)
        elif kind is BackwardWeight:
            self._weight(action, action.mb, action.chunk)
        elif kind is Free:
            self._drop("output", action.mb, action.chunk)
        elif kind is Exchange or kind is Wait:
            self._move(action, waits=kind is Wait)

    def _move(self, action: Any, waits: bool) -> None:
        """A receive takes memory when it starts; a gradient's send frees it when it is over."""
        for op in action.ops:
            if waits and op.send and op.flow == "B":
                self._drop("gradient", op.mb, op.chunk)
            elif not waits and not op.send:
                self._hold(f"in {op.flow}", op.mb, op.chunk)

    def _forward(self, action: OnMicrobatch, mb: int, chunk: int) -> None:
        here = self.chunks[chunk]
        memory = here.spared if (mb, chunk) in self.recompute.spared else here.usual
        if not self._drop("in F", mb, chunk) and here.takes:
            self._drop("output", mb, chunk - 1)  # of the stage before, which is on this rank too
        self.live[mb, chunk] = memory
        self.kept += memory.total
        self.pool += memory.pool
        if self.pool > self.most_pool:
            self.most_pool, self.at_most_pool = (
                self.pool,
                (*self.live.values(), *self.waiting.values()),
            )
        self._see(action, memory.forward)
        if here.gives:
            self._hold("output", mb, chunk)

    def _backward(self, action: OnMicrobatch, mb: int, chunk: int) -> None:
        here = self.chunks[chunk]
        memory = self.live[mb, chunk]
        self._see(action, memory.backward)
        del self.live[mb, chunk]
        self.kept -= memory.total
        if isinstance(action, BackwardInput):
            self.waiting[mb, chunk] = memory
            self.kept += memory.waiting
        else:
            self.pool -= memory.pool
        if not self._drop("in B", mb, chunk) and here.gives:
            self._drop("gradient", mb, chunk + 1)  # of the stage behind, which is on this rank too
        self._drop("output", mb, chunk)
        if here.takes:
            self._hold("gradient", mb, chunk)

    def _weight(self, action: OnMicrobatch, mb: int, chunk: int) -> None:
        self._see(action, self.chunks[chunk].deferred)
        memory = self.waiting.pop((mb, chunk))
        self.kept -= memory.waiting
        self.pool -= memory.pool

    def _see(self, action: OnMicrobatch, working: int) -> None:
        """Remember this action if more is alive while it runs than ever before."""
        total = self.kept + self.buffers + working
        if total > self.most:
            self.most = total
            waiting = sum(memory.waiting for memory in self.waiting.values())
            self.at_most = str(action), working, self.buffers, tuple(self.live.values()), waiting

    def _hold(self, what: str, mb: int, chunk: int) -> None:
        self.border[what, mb, chunk] = self.chunks[chunk].border
        self.buffers += self.chunks[chunk].border

    def _drop(self, what: str, mb: int, chunk: int) -> bool:
        """Let go of a buffer; False where there is none."""
        size = self.border.pop((what, mb, chunk), 0)
        self.buffers -= size
        return size > 0

    def peak(self) -> Peak:
        """The largest total that `take` has seen, by part."""
        action, working, buffers, live, waiting = self.at_most
        kept: Counter[str] = Counter()
        for memory in live:
            kept.update(memory.kept)
        share = [memory.graph for memory in self.at_most_pool]
        return Peak(
            dict(kept),
            waiting,
            buffers,
            working=working,
            action=action,
            in_flight=len(live),
            pool_kept=sum(part.kept for part in share),
            pool_cut=sum(part.cut for part in share),
        )
