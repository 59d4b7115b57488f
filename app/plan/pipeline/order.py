"""Compute actions of all pipeline ranks in one dependency order.

It is computed once per schedule, then timed for any times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.plan.actions import Compute
from app.plan.dependencies import Made, Pipeline, expect_finished, pipeline_of, take_turns

LETTERS = "FBIW"  # rows of a table of times
NOTHING = -1  # an action that waits for no other rank

Span = tuple[float, float]  # start, end


@dataclass(frozen=True, slots=True)
class ComputeOrder:
    """Compute lists of all ranks, each run from front to back as early as it can."""

    pipeline: Pipeline
    made: tuple[Made, ...]  # output of each action, in an order in which all can run
    # of each: its rank, its index in a table of times of letters × stages, and the index here of
    # its input from another rank; inputs from its own rank precede it anyway
    steps: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, lists: Sequence[Sequence[Compute]], v_shape: bool = False) -> ComputeOrder:
        """Build the order of lists[rank].

        Raises ValueError if they wait for each other in a circle.
        """
        pipeline = pipeline_of(lists, v_shape)
        places: dict[Made, int] = {}
        steps: list[tuple[int, int, int]] = []

        def advance(rank: int, action: Compute) -> bool:
            needs = pipeline.needs(rank, action)
            if not all(need in places for need in needs):
                return False
            far = [places[need] for need in needs if pipeline.rank(need[2]) != rank]
            made = pipeline.makes(rank, action)
            slot = LETTERS.index(action.letter) * (pipeline.last + 1) + made[2]
            places[made] = len(steps)
            steps.append((rank, slot, far[0] if far else NOTHING))
            return True

        expect_finished(lists, take_turns(lists, advance))
        return cls(pipeline, tuple(places), tuple(steps))

    def spans(self, seconds: Sequence[float], send: float) -> Iterator[tuple[int, Span]]:
        """Yield (rank, (start, end)) of each action.

        seconds: times by letter and stage. send: delay of an output of another rank.
        """
        now = [0.0] * self.pipeline.pp
        ends: list[float] = []
        for rank, slot, need in self.steps:
            start = now[rank]
            if need != NOTHING:
                start = max(start, ends[need] + send)
            now[rank] = start + seconds[slot]
            ends.append(now[rank])
            yield rank, (start, now[rank])

    def makespan(self, seconds: Sequence[float], send: float) -> float:
        """Return the time from the start of the first action to the end of the last."""
        now = [0.0] * self.pipeline.pp
        ends: list[float] = []
        add = ends.append
        for rank, slot, need in self.steps:  # as in `spans`, which is slower by half
            start = now[rank]
            if need != NOTHING and (there := ends[need] + send) > start:
                start = there
            now[rank] = end = start + seconds[slot]
            add(end)
        return max(now)  # a rank's last action ends last on it
