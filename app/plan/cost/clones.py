"""Estimated gain of clones (replicas) of hot experts."""

from __future__ import annotations

from dataclasses import dataclass

from app.config import Run
from app.plan.cost.flops import PLANNED_PEAK
from app.plan.model.experts import ExpertWeights
from app.plan.parts.dispatcher import run_dispatcher, tokens_per_rank
from app.plan.parts.static import GRADIENT, PlannedStatic
from app.plan.parts.trace import BYTES

# seconds per layer and microbatch of planning, barriers and launches, forward and backward, without
# any clone: measured on two H200s (docs/moe.md)
OVERHEAD = 113e-6


@dataclass(frozen=True, slots=True)
class CloneCosts:
    """Seconds of one rank, for one MoE layer and microbatch, forward and backward."""

    mean: float  # experts' compute at even load
    clone: float  # one clone: weights sent twice, gradient returned once
    always: float  # fixed cost, with or without clones

    @classmethod
    def of(cls, run: Run, peak: float | None = None) -> CloneCosts:
        """Return the costs on the run's hardware, with `peak` TFLOP/s if the run sets none."""
        dispatcher = run_dispatcher(run)
        assert isinstance(dispatcher, PlannedStatic)
        moe, hardware = dispatcher.moe, run.hardware
        expert = ExpertWeights.of(run.model.hidden_size, moe.ffn_hidden_size, 1).numel()
        rate = (hardware.peak_tflops or peak or PLANNED_PEAK) * 1e12 * hardware.efficiency
        rows = dispatcher.mean_rows(tokens_per_rank(run))
        link = hardware.node_gb_s if dispatcher.one_node else hardware.network_gb_s
        clone = expert * (2 * BYTES[run.precision.params] + GRADIENT) / (link * 1e9)
        mean = 6 * expert * rows / rate
        if dispatcher.peer:
            return cls(mean, clone, OVERHEAD)
        # collectives carry all slots of all ranks, used or not
        slots = (dispatcher.ranks - 1) * moe.echo.spares
        return cls(mean, 0.0, OVERHEAD + slots * clone)

    def saved(self, before: float, after: float, clones: float) -> float:
        """Return seconds saved if clones lower the busiest rank's load from `before` to `after`.

        Loads are over the mean; `clones` leave one rank, or arrive there.
        """
        return (before - after) * self.mean - clones * self.clone - self.always
