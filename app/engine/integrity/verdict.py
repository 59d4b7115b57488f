"""Which rank is at fault, from the first differences that all ranks have found.

A difference comes from another rank if that one has put other bits into a message that this rank
took part in before. At fault are the ranks whose difference came from none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.engine.integrity.replay import Replayed
from app.engine.integrity.trace import Place, Way


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """First value in which two replays of the same microbatches differ, on one rank."""

    rank: int
    place: Place
    met: tuple[Place, ...]  # messages that it has taken part in until then
    beside: int | None = None  # rank of the other replay; None: the same rank

    @property
    def sent(self) -> set[str]:
        """Return the messages sent with equal bits."""
        return {place.name for place in self.met if place.way is Way.sent}


def first_difference(
    rank: int, one: Replayed, two: Replayed, beside: int | None = None
) -> FirstDifference | None:
    """Compare two replays of the same microbatches; None if they are equal."""
    ways = [[place.way for place in each.places] for each in (one, two)]
    assert ways[0] == ways[1], "a replay takes the same way every time"
    for index, (a, b) in enumerate(zip(one.sums, two.sums, strict=True)):
        if a != b:
            place = one.places[index]
            until = index + (place.way is Way.received)
            return FirstDifference(rank, place, one.places[:until], beside)
    return None


def origins(found: Mapping[int, FirstDifference]) -> list[FirstDifference]:
    """Return the differences, by rank, that did not come from another rank."""
    sent = {rank: each.sent for rank, each in found.items()}
    return [
        each
        for each in found.values()
        if not any(
            place.name not in sent[sender]
            for place in each.met
            for sender in place.senders
            if sender in found and sender != each.rank
        )
    ]


def suspects(found: Sequence[FirstDifference]) -> tuple[list[int], FirstDifference]:
    """Return the ranks that may be at fault, and the difference that shows it.

    A rank that repeats its own work otherwise is at fault. If only two ranks disagree, either may
    be; a rank that disagrees with several others is.
    """
    alone = origins({each.rank: each for each in found if each.beside is None})
    if alone:
        return sorted({each.rank for each in alone}), alone[0]
    pairs = origins({each.rank: each for each in found})
    votes = Counter(rank for each in pairs for rank in (each.rank, each.beside))
    most = max(votes.values())
    ranks = sorted(rank for rank, count in votes.items() if count == most and rank is not None)
    return ranks, pairs[0]
