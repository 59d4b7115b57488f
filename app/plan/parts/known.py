"""Cache of what the plans of related runs share: operations of parts, and sums over them.

Plans of one model differ in schedules, stages, graphs and recomputation, while a layer has few
different lists of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from app.config import (
    CudaGraphConfig,
    HardwareConfig,
    RecomputeConfig,
    Run,
    ScheduleConfig,
)
from app.plan.layout import ParallelLayout

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownSizes:
    """What is known of the parts of runs with equal `Sizes`; treated as immutable."""

    # lists of `app.plan.parts.trace.Operation`, whose module imports this one
    operations: dict[Hashable, list[Any]] = field(default_factory=dict)
    sums: dict[Hashable, Any] = field(default_factory=dict)  # over the operations of a part

    def sum(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the sum of this key, made once."""
        if key not in self.sums:
            self.sums[key] = make()
        found: T = self.sums[key]
        return found


@dataclass(frozen=True, slots=True)
class KnownParts:
    """Operations by everything that they depend on."""

    found: dict[Hashable, KnownSizes] = field(default_factory=dict)

    def sizes(self, run: Run, layout: ParallelLayout, load: float, splits: bool) -> KnownSizes:
        """Return what is known of a run's parts.

        load: rows of the rank's experts over the mean. splits: the schedule splits backward.
        """
        key = _without_order(run), layout, load, splits
        if key not in self.found:
            self.found[key] = KnownSizes()
        return self.found[key]


def _without_order(run: Run) -> Run:
    """Return the run without what no operation depends on: stages, schedule, graphs, hardware.

    Recomputation is left out too: a part's operations are known by it.
    """
    parallel = replace(
        run.parallel,
        layout=None,
        vpp=1,
        first=None,
        last=None,
        count_embedding=False,
        count_head=False,
    )
    return replace(
        run,
        parallel=parallel,
        schedule=ScheduleConfig(),
        recompute=RecomputeConfig(),
        cuda_graph=CudaGraphConfig(),
        hardware=HardwareConfig(),
    )
