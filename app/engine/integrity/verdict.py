"""Which rank is at fault, from the first differences that all ranks have found.

A difference comes from another rank if that one has put other bits into a message that this rank
took part in before. At fault are the ranks whose difference came from none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from app.engine.integrity.replay import Replayed
from app.engine.integrity.trace import TracedValue, ValueKind


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """First value in which two replays of the same microbatches differ, on one rank."""

    rank: int
    value: TracedValue
    met: tuple[TracedValue, ...]  # messages that it has taken part in until then
    beside: int | None = None  # rank of the other replay; None: the same rank

    @property
    def sent(self) -> set[str]:
        """Return the messages sent with equal bits."""
        return {value.name for value in self.met if value.kind is ValueKind.sent}


def first_difference(
    rank: int, one: Replayed, two: Replayed, beside: int | None = None
) -> FirstDifference | None:
    """Compare two replays of the same microbatches; None if they are equal."""
    met = [
        [(value.kind, total) for value, total in zip(each.values, each.sums, strict=True)]
        for each in (one, two)
    ]
    for index, (here, there) in enumerate(zip_longest(*met)):
        if here != there:
            value = (one.values[index:] or two.values[index:])[0]
            until = index + (value.kind is ValueKind.received)
            return FirstDifference(rank, value, one.values[:until], beside)
    return None


def origins(found: Mapping[int, FirstDifference]) -> list[FirstDifference]:
    """Return the differences, by rank, that did not come from another rank."""
    sent = {rank: each.sent for rank, each in found.items()}
    return [
        each
        for each in found.values()
        if not any(
            value.name not in sent[sender]
            for value in each.met
            for sender in value.senders
            if sender in found and sender != each.rank
        )
    ] or [*found.values()]


def suspects(found: Sequence[FirstDifference]) -> tuple[list[int], FirstDifference]:
    """Return the ranks that may be at fault, and the difference that shows it.

    A rank that repeats its own work otherwise is at fault. If only two ranks disagree, either may
    be; a rank that disagrees with several others is.
    """
    repeated = {each.rank: each for each in found if each.beside is None}
    if repeated:
        alone = origins(repeated)
        return sorted({each.rank for each in alone}), alone[0]
    pairs = origins({each.rank: each for each in found})
    votes = Counter(rank for each in pairs for rank in (each.rank, each.beside))
    most = max(votes.values())
    ranks = sorted(rank for rank, count in votes.items() if count == most and rank is not None)
    return ranks, pairs[0]
