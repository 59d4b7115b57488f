"""What backward computes again instead of keeping it: the one value that says so.

`recompute_policy` alone reads `Run.recompute` for plan and engine; rules and advice look at its
keys. Traces are recorded under one of the two choices of a `RecomputePolicy`; for a rank with a
list, `RankRecompute` says which microbatch has which. The plan of memory asks it, and so does the
engine, which hands the `RecomputeChoice` of each microbatch in a chunk to the chunk, where
`app.model.recompute.Recomputation` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.choices import Balance, Recompute
from app.config import RecomputeConfig, Run
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
    """What backward computes again, on all ranks of a run."""

    usual: RecomputeChoice = NOTHING
    spared: RecomputeChoice = NOTHING  # of microbatches that may keep more than is usual
    partial: int = 0  # how many of those in flight on a rank these are

    def on_rank(self, actions: Iterable[object]) -> RankRecompute:
        """What a rank with this list computes again."""
        if not self.partial:
            return RankRecompute(self)
        return RankRecompute(self, spared_microbatches(actions, self.partial))


@dataclass(frozen=True, slots=True)
class RankRecompute:
    """What backward computes again of every microbatch on one rank."""

    policy: RecomputePolicy
    spared: frozenset[MicrobatchChunk] = frozenset()

    def of(self, key: MicrobatchChunk) -> RecomputeChoice:
        """What is computed again of a microbatch in a chunk."""
        return self.policy.spared if key in self.spared else self.policy.usual


def recompute_policy(run: Run) -> RecomputePolicy:
    """What a run computes again."""
    parts = RecomputeChoice(frozenset(run.recompute.phases))
    usual = RecomputeChoice(whole_layers=True) if run.recompute.full else parts
    return RecomputePolicy(usual, spared=parts, partial=run.recompute.partial_microbatches)


def thriftiest(run: Run) -> Run:
    """The run that keeps least and computes the same: whole layers are computed again, unless
    their routers count every forward (balance=global_batch).
    """
    moe = run.model.moe
    if moe is not None and moe.balance is Balance.global_batch:
        return run
    return replace(run, recompute=RecomputeConfig(full=True))


def spared_microbatches(actions: Iterable[object], partial: int) -> frozenset[MicrobatchChunk]:
    """Microbatches in chunks that do not recompute whole layers.

    Of every window of as many forwards as are in flight at the peak, the first `partial`: they use
    the memory that full recompute leaves over ("partial activation checkpointing").
    """
    listed = list(actions)
    window = peak_in_flight(listed)
    forwards = [(action.mb, action.chunk) for action in listed if isinstance(action, Forward)]
    return frozenset(key for nth, key in enumerate(forwards) if nth % window < partial)
