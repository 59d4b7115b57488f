"""What backward computes again instead of keeping it, microbatch by microbatch: the one value that
says so.

`RecomputePolicy` is built once, from a run and a rank's list. The plan of memory asks it which
microbatches keep more, the engine asks it for each microbatch in a chunk (`RecomputeChoice`) and
hands that to the chunk, where `app.model.recompute.Recomputation` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from app.choices import Recompute
from app.config import RecomputeConfig
from app.plan.actions import Forward, MicrobatchChunk
from app.plan.schedule import peak_in_flight


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """What backward computes again of one microbatch in one chunk."""

    parts: frozenset[Recompute] = frozenset()  # of each layer
    whole_layers: bool = False  # all of a layer from its input, the parts with it


NOTHING = RecomputeChoice()


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """What backward computes again of every microbatch."""

    parts: frozenset[Recompute] = frozenset()  # of layers that are not recomputed whole
    full: bool = False  # whole layers, of microbatches that are not spared
    spared: frozenset[MicrobatchChunk] = frozenset()

    def whole_layers(self, key: MicrobatchChunk) -> bool:
        """Whether a microbatch in a chunk keeps nothing of a layer but its input."""
        return self.full and key not in self.spared

    def of(self, key: MicrobatchChunk) -> RecomputeChoice:
        """What is computed again of a microbatch in a chunk."""
        whole = self.whole_layers(key)
        return RecomputeChoice(frozenset() if whole else self.parts, whole)


def recompute_policy(choice: RecomputeConfig, actions: Iterable[object]) -> RecomputePolicy:
    """What a rank with this list computes again."""
    spared = frozenset[MicrobatchChunk]()
    if choice.full and choice.partial_microbatches:
        spared = spared_microbatches(actions, choice.partial_microbatches)
    return RecomputePolicy(frozenset(choice.phases), choice.full, spared)


def spared_microbatches(actions: Iterable[object], partial: int) -> frozenset[MicrobatchChunk]:
    """Microbatches in chunks that do not recompute whole layers.

    Of every window of as many forwards as are in flight at the peak, the first `partial`: they use
    the memory that full recompute leaves over ("partial activation checkpointing").
    """
    listed = list(actions)
    window = peak_in_flight(listed)
    forwards = [(action.mb, action.chunk) for action in listed if isinstance(action, Forward)]
    return frozenset(key for nth, key in enumerate(forwards) if nth % window < partial)
