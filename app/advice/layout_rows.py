"""Rows of the comparison of layouts."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import Run
from app.plan.cost.flops import run_flops_per_token


@dataclass(frozen=True, slots=True)
class Cost:
    """Time and cost of a layout at one bandwidth of the network between nodes."""

    seconds: float  # of one step
    tokens_per_second: float  # of all GPUs
    tflops_per_gpu: float  # model FLOPs, without recomputation
    gpu_hours: float  # for the given tokens
    days: float

    @classmethod
    def of(cls, run: Run, seconds: float, tokens: float) -> Cost:
        """Build the cost of a run whose step takes `seconds`, for so many tokens."""
        rate = run.train.global_batch * run.train.seq_len / seconds
        flops = run_flops_per_token(run)
        hours = tokens / rate / 3600
        return cls(
            seconds,
            rate,
            rate * flops / run.world_size / 1e12,
            gpu_hours=hours * run.world_size,
            days=hours / 24,
        )


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """A layout that fits, or the run's own."""

    own: bool  # the run as it is typed
    overrides: tuple[str, ...]  # that turn the run into it; empty for its own
    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    ep: int
    etp: int
    micro_batch: int
    microbatches: int  # per step and rank
    schedule: str
    recompute: tuple[str, ...]  # parts of layers; ("full",) for whole layers
    graphs: str  # what is captured
    dispatcher: str | None  # transport of tokens to experts; None for a dense model
    memory: int  # bytes of the busiest rank
    fits: bool
    cost: Cost
    slower: Cost  # with the slower network


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """Comparison of layouts, rows in order of time."""

    world_size: int
    tokens: float  # that GPU hours are counted for
    gpu_memory: int  # bytes
    network_gb_s: float
    slower_gb_s: float
    planned: int  # layouts planned by the search
    complete: bool  # no layout of the search space can be faster than the rows shown
    rows: tuple[LayoutRow, ...]

    @property
    def fastest(self) -> LayoutRow | None:
        """Fastest row that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def fastest_slower(self) -> LayoutRow | None:
        """Fastest row that fits with the slower network; None if none does."""
        fitting = (row for row in self.rows if row.fits)
        return min(fitting, key=lambda row: row.slower.seconds, default=None)
