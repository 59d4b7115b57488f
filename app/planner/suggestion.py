"""A suggested change of a run, as a plan shows it; `app.advice` finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Changes that make a run fit, or faster."""

    overrides: tuple[str, ...]  # as typed on the command line
    memory: int  # bytes of the busiest rank with the changes
    slowdown: float  # estimated time of a step over that of the original run
    cost: str  # drawback, in words
