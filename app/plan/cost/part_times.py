"""Seconds of a part or a stage for one microbatch, by kind of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from app.plan.parts.trace import Work

T = TypeVar("T")
Seconds = defaultdict[str, float]  # by kind of work

EXCHANGE = "exchanges"
LAUNCHES = "launches"
QUANTISED = "quantising"
RECOMPUTED = "recomputed"
RECOMPUTED_MATMULS = "recomputed GEMMs"
OFFLOADED = "copies to host memory"
MATMULS = (Work.gemm, Work.router_matmul, Work.grouped)
ATTENTION = (
    Work.attention,
    Work.ordered_attention,
    Work.gathered_attention,
    Work.cudnn_ordered_attention,
    Work.capped_attention,
    Work.linear_attention,
)
# compute-bound kinds, which slow down with the clock
ARITHMETIC = (*(work.value for work in (*MATMULS, *ATTENTION)), RECOMPUTED_MATMULS)


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of a part or a stage for one microbatch, by kind of work."""

    forward: Mapping[str, float]
    backward_input: Mapping[str, float]  # recomputation included
    backward_weight: Mapping[str, float]
    # seconds of the host: kernel launches outside of graphs
    forward_host: float
    backward_host: float
    # FLOPs of GEMMs and attention, all passes; those in FP8 count
    # divided by their speedup
    operations: float

    @classmethod
    def together(cls, parts: Sequence[tuple[PartTimes, int]]) -> PartTimes:
        """Return the times of a stage from its parts, and the number of each."""
        return cls(
            _sum((part.forward, times) for part, times in parts),
            _sum((part.backward_input, times) for part, times in parts),
            _sum((part.backward_weight, times) for part, times in parts),
            forward_host=sum(part.forward_host * times for part, times in parts),
            backward_host=sum(part.backward_host * times for part, times in parts),
            operations=sum(part.operations * times for part, times in parts),
        )

    def by_kind(self) -> Seconds:
        """Return all passes together."""
        return _sum([(self.forward, 1), (self.backward_input, 1), (self.backward_weight, 1)])

    def at_clock(self, clock: float) -> PartTimes:
        """Return the times at a share of the GPU's clock."""
        return replace(
            self,
            forward=_at_clock(self.forward, clock),
            backward_input=_at_clock(self.backward_input, clock),
            backward_weight=_at_clock(self.backward_weight, clock),
        )

    def hosted(self) -> PartTimes:
        """Return the times with waits for launches, if the host is slower than the GPU."""
        forward, inputs = _sum([(self.forward, 1)]), _sum([(self.backward_input, 1)])
        backward = sum(inputs.values()) + sum(self.backward_weight.values())
        forward[LAUNCHES] += max(0.0, self.forward_host - sum(forward.values()))
        inputs[LAUNCHES] += max(0.0, self.backward_host - backward)
        return replace(self, forward=forward, backward_input=inputs)


def once_each(items: Sequence[T], make: Callable[[T], PartTimes]) -> list[PartTimes]:
    """Return `make` of each item, made once of those that are one object."""
    made: dict[int, PartTimes] = {}
    for item in items:
        if id(item) not in made:
            made[id(item)] = make(item)
    return [made[id(item)] for item in items]


def _sum(rows: Iterable[tuple[Mapping[str, float], int]]) -> Seconds:
    total: Seconds = defaultdict(float)
    for found, times in rows:
        for kind, seconds in found.items():
            total[kind] += times * seconds
    return total


def _at_clock(found: Mapping[str, float], clock: float) -> dict[str, float]:
    return {kind: time / clock if kind in ARITHMETIC else time for kind, time in found.items()}
