"""Peak memory of a pipeline rank in a step: moments of its list, weighed with bytes.

See `app.plan.pipeline.moments`. Between the two parts of a split backward, the inputs of GEMMs and
the gradients of their outputs are alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.plan.memory.activations import ChunkActivations, MicrobatchMemory
from app.plan.pipeline.moments import Borders, Counts, Moment


@dataclass(frozen=True, slots=True)
class Peak:
    """Memory of a rank at its peak, in bytes."""

    kept: Mapping[str, int]  # phase -> saved by autograd
    waiting: int  # for weight gradients of a split backward
    buffers: int  # sent or received tensors
    working: int  # alive only while the action runs
    action: str  # the action that runs at the peak
    in_flight: int  # microbatches with saved activations, counted once per chunk
    pool_kept: int  # in partial graphs, when these hold most: saved for their own backward
    pool_cut: int  # and tensors that leave graphs

    @property
    def total(self) -> int:
        """All of it outside of graphs."""
        return sum(self.kept.values()) + self.waiting + self.buffers + self.working


def borders_of(chunks: Sequence[ChunkActivations]) -> Borders:
    """Return, for each chunk, whether hidden states come in and go out."""
    return tuple((chunk.takes, chunk.gives) for chunk in chunks)


def find_peak(moments: Mapping[Moment, str], chunks: Sequence[ChunkActivations]) -> Peak:
    """Return the peak of a training step; of equally high ones the first."""
    found = _Weights(chunks)
    most = max(moments, key=found.total)
    fullest = max((moment for moment in moments if moment.letter == "F"), key=found.pool)
    kept: Counter[str] = Counter()
    for count, memory in zip(most.live, found.memories, strict=True):
        kept.update({phase: count * size for phase, size in memory.kept.items() if count})
    pool = [
        (count + more, memory.graph)
        for count, more, memory in zip(fullest.live, fullest.waiting, found.memories, strict=True)
    ]
    return Peak(
        dict(kept),
        _dot(most.waiting, found.waiting),
        most.buffers * found.border,
        working=found.working(most),
        action=moments[most],
        in_flight=sum(most.live),
        pool_kept=sum(count * part.kept for count, part in pool),
        pool_cut=sum(count * part.cut for count, part in pool),
    )


class _Weights:
    """Bytes of what moments count."""

    def __init__(self, chunks: Sequence[ChunkActivations]) -> None:
        self.chunks = chunks
        self.border = chunks[0].border  # of all chunks: hidden states have the same size everywhere
        # in the order of Counts
        self.memories: list[MicrobatchMemory] = [
            memory for chunk in chunks for memory in (chunk.usual, chunk.spared)
        ]
        self.kept = [memory.total for memory in self.memories]
        self.waiting = [memory.waiting for memory in self.memories]
        self.pools = [memory.pool for memory in self.memories]

    def working(self, moment: Moment) -> int:
        """Return bytes that are alive only while the action runs."""
        memory = self.memories[moment.place]
        if moment.letter == "W":
            return self.chunks[moment.place // 2].deferred
        return memory.forward if moment.letter == "F" else memory.backward

    def total(self, moment: Moment) -> int:
        """Return all bytes outside of graphs."""
        held = _dot(moment.live, self.kept) + _dot(moment.waiting, self.waiting)
        return held + moment.buffers * self.border + self.working(moment)

    def pool(self, moment: Moment) -> int:
        """Return all bytes in partial graphs."""
        return _dot(moment.live, self.pools) + _dot(moment.waiting, self.pools)


def _dot(counts: Counts, sizes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True) if count)
