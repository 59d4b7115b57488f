"""Cache of action lists that several plans share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from app.plan.actions import Action, BackwardWeight, Compute
from app.plan.pipeline.lowering import lower_all
from app.plan.pipeline.order import ComputeOrder
from app.plan.schedule import build_schedule, v_shaped

# chunk -> actions of its rank after the chunk's last weight gradient, by letter and chunk, in the
# order of those gradients; empty if backward is not split
WorkLeft = Mapping[int, Mapping[tuple[str, int], int]]


@dataclass(frozen=True, slots=True)
class ScheduleKey:
    """Values that determine the lists of a training step."""

    name: str  # of app.plan.schedule
    pp: int
    num_microbatches: int
    num_chunks: int
    group_size: int | None


@dataclass(frozen=True, slots=True)
class KnownSchedules:
    """Compute lists, their order and their lowered lists; treated as immutable."""

    computes: dict[ScheduleKey, list[list[Compute]]] = field(default_factory=dict)
    orders: dict[ScheduleKey, ComputeOrder] = field(default_factory=dict)
    left: dict[ScheduleKey, list[WorkLeft]] = field(default_factory=dict)
    lowered: dict[tuple[ScheduleKey, bool], list[list[Action]]] = field(default_factory=dict)

    def compute(self, key: ScheduleKey) -> list[list[Compute]]:
        """Return the compute actions of each pipeline rank. ValueError as in `build_schedule`."""
        if key not in self.computes:
            self.computes[key] = build_schedule(
                key.name,
                key.pp,
                key.num_microbatches,
                num_chunks=key.num_chunks,
                group_size=key.group_size,
            )
        return self.computes[key]

    def order(self, key: ScheduleKey) -> ComputeOrder:
        """Return these actions in one order, to be timed."""
        if key not in self.orders:
            self.orders[key] = ComputeOrder.of(self.compute(key), v_shaped(key.name))
        return self.orders[key]

    def work_left(self, key: ScheduleKey) -> list[WorkLeft]:
        """Return, of each pipeline rank, the work after its last weight gradients."""
        if key not in self.left:
            self.left[key] = [work_left(actions) for actions in self.compute(key)]
        return self.left[key]

    def actions(self, key: ScheduleKey, overlap: bool) -> list[list[Action]]:
        """Return all actions of each pipeline rank (`lower_all`)."""
        if (key, overlap) not in self.lowered:
            lists = lower_all(self.compute(key), overlap, v_shape=v_shaped(key.name))
            self.lowered[key, overlap] = lists
        return self.lowered[key, overlap]


def work_left(actions: Sequence[Compute]) -> WorkLeft:
    """Count a rank's actions after each chunk's last weight gradient."""
    left: dict[int, Counter[tuple[str, int]]] = {}
    behind: Counter[tuple[str, int]] = Counter()
    for action in reversed(actions):
        if isinstance(action, BackwardWeight) and action.chunk not in left:
            left[action.chunk] = behind.copy()
        behind[action.letter, action.chunk] += 1
    return dict(reversed(left.items()))
