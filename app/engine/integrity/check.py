"""Check every few steps that this rank and its replicas compute and hold what they should:
`train.replay_every`.

Device and host wait for each other here, so a check costs more than its kernels. It changes neither
parameters, optimizer state nor random numbers; main gradients are overwritten, which the next step
clears anyway.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from app.data.feed import Batch
from app.engine.integrity.replay import Partners, Replay
from app.engine.integrity.verdict import FirstDifference, first_difference, suspects
from app.engine.integrity.weights import Weights, WrongWeights
from app.engine.step.engine import Engine
from app.engine.step.step import TrainingStep


@dataclass(frozen=True, slots=True)
class Corruption:
    """Difference between what must be equal, the same on every rank."""

    ranks: tuple[int, ...]  # that are at fault, or one of which is
    text: str


@dataclass(frozen=True, slots=True)
class Findings:
    """Differences that one rank has found."""

    device: str  # name of its host and device
    weights: tuple[WrongWeights, ...]
    differences: tuple[FirstDifference, ...]


@dataclass(slots=True)
class IntegrityCheck:
    """Check of all ranks together; `every`: steps between two."""

    step: TrainingStep
    every: int
    replay: Replay = field(init=False)
    weights: Weights = field(init=False)
    partners: Partners | None = field(init=False)

    def __post_init__(self) -> None:
        self.replay = Replay(self.step)
        self.weights = Weights(self.engine)
        self.partners = Partners.of(self.engine)

    @property
    def engine(self) -> Engine:
        """Engine that trains."""
        return self.step.engine

    def after(self, step: int, batches: Sequence[Batch], now: bool = False) -> Corruption | None:
        """Check after a step with these microbatches, if one is due or with `now`; all ranks call
        it.
        """
        if step % self.every and not now:
            return None
        engine = self.engine
        engine.watchdog.note("a comparison of weights")
        engine.gather_all_params()
        wrong = tuple(self.weights.wrong())
        engine.watchdog.note("a replay of microbatches")
        differences = tuple(self._differences(step, list(batches[: self.replay.count()])))
        engine.watchdog.rest("between steps")
        return self._agree(wrong, differences)

    def _differences(self, step: int, batches: list[Batch]) -> list[FirstDifference]:
        rank = self.engine.groups.rank
        seed = step * self.engine.groups.world.size() + rank
        once = self.replay(batches, seed)
        again = self.replay(batches, seed)
        found = [first_difference(rank, again, once)]
        if self.partners is not None:
            others = self.replay(*self.partners.swap((batches, seed)))
            theirs = self.partners.swap(once)
            found.append(first_difference(rank, others, theirs, self.partners.source))
        return [each for each in found if each is not None]

    def _agree(
        self, wrong: tuple[WrongWeights, ...], differences: tuple[FirstDifference, ...]
    ) -> Corruption | None:
        """Put the findings of all ranks together."""
        groups = self.engine.groups
        mine = Findings(device_name(self.engine.device), wrong, differences)
        found = [mine] * groups.host.size()
        if groups.host.size() > 1:
            dist.all_gather_object(found, mine if wrong or differences else None, groups.host)
            if not any(found):
                return None
            dist.all_gather_object(found, mine, groups.host)
        return conclude(found)


def conclude(found: Sequence[Findings]) -> Corruption | None:
    """Return what the findings of all ranks, by rank, say together; None if they are empty."""
    weights = [each for of_rank in found for each in of_rank.weights]
    if weights:
        worst = weights[0]
        return Corruption(worst.ranks, f"{_named(worst.ranks, found)} holds wrong bits: {worst}")
    differences = [each for of_rank in found for each in of_rank.differences]
    if not differences:
        return None
    ranks, shown = suspects(differences)
    verb = shown.value.kind.value
    how = "when it repeated a microbatch" if shown.beside is None else "than the other replica"
    text = f"{_named(ranks, found)} {verb} other bits {how}: {shown.value.name}"
    return Corruption(tuple(ranks), text)


def _named(ranks: Sequence[int], found: Sequence[Findings]) -> str:
    names = [f"rank {rank} ({found[rank].device})" for rank in ranks]
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def device_name(device: torch.device) -> str:
    """Return host and device of this process as an administrator finds them."""
    host = socket.gethostname()
    if device.type != "cuda":
        return host
    return f"{host}, {device}, GPU-{torch.cuda.get_device_properties(device).uuid}"
