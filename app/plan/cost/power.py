"""GPU clocks under a power limit: compute-bound kernels slow down, memory-bound ones do not.

An operation takes energy in proportion to the square of the clock, as the voltage follows it, so
operations per second times that square have a bound. GEMMs without a pause determine it: they slow
down from `gemm_tflops` to `sustained_tflops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.config import HardwareProfile
from app.plan.cost.part_times import ARITHMETIC, PartTimes
from app.plan.cost.rates import TERA
from app.plan.dependencies import Pipeline

HALVINGS = 20  # steps of the bisection for a clock
SLOWEST = 0.1  # lowest share of its clock that a GPU is assumed to reach


def at_clocks(
    stages: Sequence[PartTimes], pipeline: Pipeline, profile: HardwareProfile
) -> list[PartTimes]:
    """Return times of stages, in their order, at the clocks that their pipeline ranks sustain.

    A rank that waits for the slowest one cools down meanwhile, and has a higher clock.
    """
    clocks = rank_clocks(stages, pipeline, profile)
    found, slowed = list(stages), dict[tuple[int, float], PartTimes]()
    for place, stage in enumerate(stages):
        key = id(stage), clocks[pipeline.rank(place)]
        if key not in slowed:
            slowed[key] = stage.at_clock(key[1])
        found[place] = slowed[key]
    return found


def rank_clocks(
    stages: Sequence[PartTimes], pipeline: Pipeline, profile: HardwareProfile
) -> list[float]:
    """Return the share of the highest clock that each pipeline rank sustains, 0 to 1.

    `stages` are times at full clock, in stage order.
    """
    bound = power_bound(profile)
    of_ranks = [
        tuple(stage for place, stage in enumerate(stages) if pipeline.rank(place) == rank)
        for rank in range(pipeline.pp)
    ]
    loads: dict[tuple[int, ...], _Load] = {}  # by stages: ranks may have equal ones
    for held in of_ranks:
        if (key := tuple(map(id, held))) not in loads:
            loads[key] = _Load.of(held)
    slowest = max(load.seconds(load.clock(bound)) for load in loads.values())
    clocks = {key: load.clock(bound, period=slowest) for key, load in loads.items()}
    return [clocks[tuple(map(id, held))] for held in of_ranks]


def power_bound(profile: HardwareProfile) -> float:
    """Return the bound on operations per second, times the square of the share of the clock."""
    return profile.sustained_tflops**3 / profile.gemm_tflops**2 * TERA


@dataclass(frozen=True, slots=True)
class _Load:
    """Work of a pipeline rank for one microbatch, at full clock."""

    operations: float
    arithmetic: float  # seconds of compute-bound kernels
    other: float  # seconds of all other kernels
    host: float  # seconds of kernel launches

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
        """Return the time at a share of the clock."""
        return max(self.other + self.arithmetic / clock, self.host)

    def clock(self, bound: float, period: float = 0.0) -> float:
        """Return the share of the clock that power allows, with a microbatch per `period`
        seconds.
        """

        def allowed(clock: float) -> bool:
            return self.operations * clock**2 <= bound * max(self.seconds(clock), period)

        if allowed(1.0):
            return 1.0
        low, high = SLOWEST, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if allowed(middle) else (low, middle)
        return low
