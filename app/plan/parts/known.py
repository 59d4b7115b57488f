"""Cache of what the plans of related runs share: operations of parts, and sums over them.

Plans of one model differ in schedules, stages, graphs and recomputation, while a layer has few
different lists of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from app.config import ParallelConfig, Run
from app.plan.layout import ParallelLayout

T = TypeVar("T")
L = TypeVar("L")
ORDER = ("parallel", "schedule", "recompute", "cuda_graph", "hardware")
STAGES = ("layout", "vpp", "first", "last", "count_embedding", "count_head")
SECTIONS = tuple(each.name for each in fields(Run) if each.name not in ORDER)
DEGREES = tuple(each.name for each in fields(ParallelConfig) if each.name not in STAGES)


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """What is known of the parts of runs with equal `Sizes`; treated as immutable."""

    # lists of `app.plan.parts.trace.Operation`, whose module imports this one
    operations: dict[Hashable, list[Any]] = field(default_factory=dict)
    sums: dict[Hashable, Any] = field(default_factory=dict)  # over the operations of a part
    # by what they depend on beside parts and recomputation, then by these
    by_name: dict[Hashable, dict[Hashable, Any]] = field(default_factory=dict)

    def sum(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the sum of this key, made once."""
        if key not in self.sums:
            self.sums[key] = make()
        found: T = self.sums[key]
        return found

    def named(self, name: Hashable) -> dict[Hashable, Any]:
        """Return the sums that depend on `name`, by part and recomputation."""
        return self.by_name.setdefault(name, {})


@dataclass(frozen=True, slots=True)
class KnownParts:
    """Operations by everything that they depend on."""

    found: dict[Hashable, KnownSizes] = field(default_factory=dict)
    # by the identity of a list of actions, which stays beside its value as long as that
    of_lists: dict[tuple[int, Hashable], tuple[object, Any]] = field(default_factory=dict)

    def of_list(self, actions: L, make: Callable[[L], T]) -> T:
        """Return `make` of a rank's actions, made once for this very list, which is not changed."""
        key = id(actions), make
        if key not in self.of_lists:
            self.of_lists[key] = actions, make(actions)
        found: T = self.of_lists[key][1]
        return found

    def sizes(self, run: Run, layout: ParallelLayout, load: float, splits: bool) -> KnownSizes:
        """Return what is known of a run's parts.

        load: rows of the rank's experts over the mean. splits: the schedule splits backward.
        """
        key = _without_order(run), layout, load, splits
        if key not in self.found:
            self.found[key] = KnownSizes()
        return self.found[key]


def _without_order(run: Run) -> Hashable:
    """Return the values of a run without what no operation depends on: stages, schedule, graphs,
    hardware.

    Recomputation is left out too: a part's operations are known by it.
    """
    sections = tuple(getattr(run, name) for name in SECTIONS)
    return sections, tuple(getattr(run.parallel, name) for name in DEGREES)
