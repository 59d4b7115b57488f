"""Recomputation of a run: which activations backward recomputes instead of saving them.

`recompute_policy` alone reads `Run.recompute` for plan and engine; rules and advice look at its
keys. Traces are recorded under one of the two choices of a `RecomputePolicy`. For a rank with a
list of actions, `RankRecompute` has the choice of each microbatch. The memory plan asks it, and so
does the engine, which hands the `RecomputeChoice` of each microbatch to the chunk, where
`app.model.layers.recompute.Recomputation` carries it out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.choices import Balance, Offload, Recompute
from app.config import RecomputeConfig, Run
from app.plan.actions import Forward, MicrobatchChunk
from app.plan.phases import OFFLOADED, PhaseName
from app.plan.schedule import peak_in_flight

# bytes of memory of saved tensors from which it is offloaded: a copy takes 10 µs to start
OFFLOADED_FROM = 64 * 1024
KEPT_PHASES = (PhaseName.preprocess, PhaseName.dispatch)  # they save integers


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """Recomputation of one microbatch in one chunk."""

    parts: frozenset[Recompute] = frozenset()  # of each layer
    whole_layers: bool = False  # every layer from its input, which includes all parts
    offload: frozenset[Offload] = frozenset()  # parts that keep what they save in host memory

    def offloads(self, phase: str, saved: int) -> bool:
        """Return whether bytes that an operation of a phase saves go to host memory."""
        if saved < OFFLOADED_FROM or phase in KEPT_PHASES:
            return False
        return any(phase in OFFLOADED[part] for part in self.offload)


NOTHING = RecomputeChoice()


@dataclass(frozen=True, slots=True)
class RecomputePolicy:
    """Recomputation on all ranks of a run."""

    usual: RecomputeChoice = NOTHING
    # for microbatches with partial activation checkpointing, which save more
    spared: RecomputeChoice = NOTHING
    partial: int = 0  # how many of those in flight on a rank are spared

    def on_rank(self, actions: Iterable[object]) -> RankRecompute:
        """Return the recomputation of each microbatch on a rank with this list."""
        if not self.partial:
            return RankRecompute(self)
        return RankRecompute(self, spared_microbatches(actions, self.partial))


@dataclass(frozen=True, slots=True)
class RankRecompute:
    """Recomputation of every microbatch on one rank."""

    policy: RecomputePolicy
    spared: frozenset[MicrobatchChunk] = frozenset()

    def of(self, key: MicrobatchChunk) -> RecomputeChoice:
        """Return what is recomputed of a microbatch in a chunk."""
        return self.policy.spared if key in self.spared else self.policy.usual


def recompute_policy(run: Run) -> RecomputePolicy:
    """Return the recomputation of a run."""
    offload = frozenset(run.recompute.offload)
    parts = RecomputeChoice(frozenset(run.recompute.phases), offload=offload)
    full = RecomputeChoice(whole_layers=True, offload=offload)
    usual = full if run.recompute.full else parts
    return RecomputePolicy(usual, spared=parts, partial=run.recompute.partial_microbatches)


def with_full_recompute(run: Run) -> Run:
    """Return the run with full recomputation, which saves the fewest activations.

    Unchanged if routers count every forward (balance=global_batch): a rerun would count twice.
    """
    moe = run.model.moe
    if moe is not None and moe.balance is Balance.global_batch:
        return run
    return replace(run, recompute=RecomputeConfig(full=True))


def spared_microbatches(actions: Iterable[object], partial: int) -> frozenset[MicrobatchChunk]:
    """Return the microbatches in chunks that do not recompute whole layers.

    These are the first `partial` of every window of as many forwards as are in flight at the peak.
    They use the memory that full recomputation leaves over ("partial activation checkpointing").
    """
    listed = list(actions)
    window = peak_in_flight(listed)
    forwards = [(action.mb, action.chunk) for action in listed if isinstance(action, Forward)]
    return frozenset(key for nth, key in enumerate(forwards) if nth % window < partial)
