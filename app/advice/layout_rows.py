"""What is shown of layouts that are compared."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import Run
from app.plan.cost.flops import flops_per_token


@dataclass(frozen=True, slots=True)
class Cost:
    """What a layout takes at one speed of the network between nodes."""

    seconds: float  # of a step
    tokens_per_second: float  # of all GPUs
    tflops_per_gpu: float  # of the model's own operations
    gpu_hours: float  # of the tokens that are asked for
    days: float

    @classmethod
    def of(cls, run: Run, seconds: float, tokens: float) -> Cost:
        """Of a run whose step takes so long, for so many tokens."""
        rate = run.train.global_batch * run.train.seq_len / seconds
        flops = flops_per_token(run.model, run.train.seq_len)
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
    overrides: tuple[str, ...]  # that make the run it; of its own none
    tp: int
    cp: int
    pp: int
    vpp: int
    dp: int
    ep: int
    etp: int
    micro_batch: int
    microbatches: int  # of a step, on each rank
    schedule: str
    recompute: tuple[str, ...]  # parts of layers; "full": whole ones
    graphs: str  # what is captured
    dispatcher: str | None  # of tokens to experts; None: a dense model
    memory: int  # bytes of the busiest rank
    fits: bool
    cost: Cost
    slower: Cost  # with the slower network


@dataclass(frozen=True, slots=True)
class LayoutComparison:
    """What is shown: rows by time."""

    world_size: int
    tokens: float  # that GPU hours are of
    gpu_memory: int  # bytes
    network_gb_s: float
    slower_gb_s: float
    planned: int  # how many were
    complete: bool  # no layout of the search can be among the fastest without standing here
    rows: tuple[LayoutRow, ...]

    @property
    def fastest(self) -> LayoutRow | None:
        """Of those that fit; None: none does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def fastest_slower(self) -> LayoutRow | None:
        """The same with the slower network."""
        fitting = (row for row in self.rows if row.fits)
        return min(fitting, key=lambda row: row.slower.seconds, default=None)
