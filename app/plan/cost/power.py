"""How far a GPU lowers its clock under a steady load of products, so that it stays within its
power: kernels that wait for arithmetic take as much longer, those that wait for memory do not.

An operation takes energy in proportion to the square of the clock, as the voltage follows it, so
operations per second times that square have a bound. Products without a pause tell it: they slow
down from `gemm_tflops` to `sustained_tflops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.config import HardwareProfile
from app.plan.cost.part_times import ARITHMETIC, PartTimes
from app.plan.cost.rates import TERA
from app.plan.pipeline.dependencies import Pipeline

HALVINGS = 20  # of the interval that a clock is looked for in
SLOWEST = 0.1  # share of its clock that no GPU goes below


def at_clocks(
    stages: Sequence[PartTimes], pipeline: Pipeline, profile: HardwareProfile
) -> list[PartTimes]:
    """Times of stages, in their order, at the clocks that their pipeline ranks keep up. A rank that
    waits for the slowest one cools down meanwhile.
    """
    bound = power_bound(profile)
    places = [
        [place for place in range(len(stages)) if pipeline.rank(place) == rank]
        for rank in range(pipeline.pp)
    ]
    loads = [_Load.of([stages[place] for place in of_rank]) for of_rank in places]
    slowest = max(load.seconds(load.clock(bound)) for load in loads)
    found = list(stages)
    for of_rank, load in zip(places, loads, strict=True):
        clock = load.clock(bound, period=slowest)
        for place in of_rank:
            found[place] = stages[place].at_clock(clock)
    return found


def power_bound(profile: HardwareProfile) -> float:
    """Operations per second, times the square of the share of the clock, that power allows."""
    return profile.sustained_tflops**3 / profile.gemm_tflops**2 * TERA


@dataclass(frozen=True, slots=True)
class _Load:
    """What a pipeline rank does for one microbatch at its full clock."""

    operations: float
    arithmetic: float  # seconds of kernels that wait for it
    other: float  # seconds of all else
    host: float  # seconds of launches

    @classmethod
    def of(cls, stages: Sequence[PartTimes]) -> _Load:
        kinds = [stage.by_kind() for stage in stages]
        whole = sum(sum(found.values()) for found in kinds)
        arithmetic = sum(found[kind] for found in kinds for kind in ARITHMETIC)
        return cls(
            sum(stage.operations for stage in stages),
            arithmetic=arithmetic,
            other=whole - arithmetic,
            host=sum(stage.forward_host + stage.backward_host for stage in stages),
        )

    def seconds(self, clock: float) -> float:
        """At a share of the clock."""
        return max(self.other + self.arithmetic / clock, self.host)

    def clock(self, bound: float, period: float = 0.0) -> float:
        """The share that power allows, where a microbatch comes every `period` seconds or more."""

        def allowed(clock: float) -> bool:
            return self.operations * clock**2 <= bound * max(self.seconds(clock), period)

        if allowed(1.0):
            return 1.0
        low, high = SLOWEST, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if allowed(middle) else (low, middle)
        return low
