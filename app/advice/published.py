"""Planned speed of a run beside a published one: the gap, its parts, and how far to trust it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from app.plan.cost.flops import run_flops_per_token
from app.plan.cost.part_times import (
    ATTENTION,
    EXCHANGE,
    LAUNCHES,
    OFFLOADED,
    QUANTISED,
    RECOMPUTED,
    RECOMPUTED_MATMULS,
)
from app.plan.cost.step_time import IDLE
from app.plan.parts.trace import Work
from app.planner.known import Known
from app.planner.plan import Plan

# errors of planned times beside measured ones, median and 90th percentile (docs/planning.md)
MEASURED = 0.03, 0.12  # with a measured profile, on one to four GPUs of a node
ASSUMED = 0.20, 0.46  # from numbers of a data sheet
NETWORK = 2.0  # factor by which a network's real speed may differ, either way
BUBBLE = "pipeline bubble"
# kind of work in a plan -> part of a comparison
PARTS: Mapping[str, str] = MappingProxyType({
    **{work.value: "attention" for work in (*ATTENTION, Work.heads)},
    Work.gemm.value: "dense GEMMs",
    Work.router_matmul.value: "router GEMM",
    Work.grouped.value: "experts' GEMMs",
    Work.rows.value: "permutation of tokens",
    **{
        work.value: "norms, activations, loss"
        for work in (Work.activation, Work.norm, Work.loss, Work.other)
    },
    LAUNCHES: "launches",
    QUANTISED: "quantizing to FP8",
    RECOMPUTED: "recomputation",
    RECOMPUTED_MATMULS: "recomputation",
    OFFLOADED: "copies to host memory",
    "reduction of gradients": "data-parallel collectives",
    "gathering of parameters": "data-parallel collectives",
    "optimizer": "optimizer",
    "between steps": "between steps",
    IDLE: BUBBLE,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartOfGap:
    """A part of the planned step, and what it alone would have to take."""

    name: str
    seconds: float
    # share of these seconds in which the step is as fast as published; None: no share is
    closes: float | None


@dataclass(frozen=True, slots=True)
class PublishedGap:
    """A planned run beside a published speed."""

    published_tflops: float  # model FLOPs per GPU and second
    planned_tflops: float
    published_seconds: float  # of a step with the plan's FLOPs per token
    planned_seconds: float
    flops_per_token: float  # as the plan counts them
    errors: tuple[float, float]  # of planned times, median and 90th percentile
    reasons: tuple[str, ...]  # why the errors are no smaller
    low_tflops: float  # range by the 90th percentile and a slower or faster network
    high_tflops: float
    parts: tuple[PartOfGap, ...]  # of the pipeline rank that idles least, largest first

    @property
    def gap(self) -> float:
        """Seconds by which the planned step is longer than the published one; negative: shorter."""
        return self.planned_seconds - self.published_seconds

    @property
    def explained(self) -> bool:
        """True if the published speed is inside the range."""
        return self.low_tflops <= self.published_tflops <= self.high_tflops


def published_gap(plan: Plan, tflops: float) -> PublishedGap:
    """Compare a plan with a published speed, in model TFLOP/s per GPU."""
    run, seconds = plan.run, plan.step_seconds
    flops = run_flops_per_token(run)
    work = run.train.global_batch * run.train.seq_len * flops / run.world_size / 1e12
    published = work / tflops
    parts = _parts(plan)
    errors, reasons = _errors(plan)
    slow, fast = seconds, seconds
    if run.world_size > run.parallel.gpus_per_node:
        slow, fast = (_at_network(plan, factor) for factor in (1 / NETWORK, NETWORK))
        reasons = (*reasons, f"the network is planned, not measured: {NETWORK:g} times either way")
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return PublishedGap(
        tflops,
        planned_tflops=work / seconds,
        published_seconds=published,
        planned_seconds=seconds,
        flops_per_token=flops,
        errors=errors,
        reasons=reasons,
        low_tflops=work / (slow * (1 + errors[1])),
        high_tflops=work / (fast * (1 - errors[1])),
        parts=tuple(PartOfGap(name, s, _closes(s, seconds - published)) for name, s in shown),
    )


def _parts(plan: Plan) -> dict[str, float]:
    """Return part -> seconds of a step; without a profile only compute and the bubble."""
    found: defaultdict[str, float] = defaultdict(float)
    for kind, seconds in plan.time_by_kind.items():
        found[_exchanges(plan) if kind == EXCHANGE else PARTS[kind]] += seconds
    if not found:
        busy = plan.step_seconds * (1 - plan.timeline.bubble_fraction)
        found |= {"compute and exposed traffic": busy, BUBBLE: plan.step_seconds - busy}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def _exchanges(plan: Plan) -> str:
    """Return the name of exposed collectives within layers: those that the layout has."""
    layout = plan.layout
    experts = layout.ep * layout.expert_tp if plan.run.model.moe else 1
    has = {"dispatch of tokens": experts, "tp": layout.tp, "cp": layout.cp}
    return " and ".join(name for name, ranks in has.items() if ranks > 1) or "exchanges"


def _errors(plan: Plan) -> tuple[tuple[float, float], tuple[str, ...]]:
    profile = plan.profile
    if profile is None:
        return ASSUMED, ("no profile: speeds are the data sheet's times hardware.efficiency",)
    if profile.scaled:
        return ASSUMED, (f"speeds of {profile.gpu} are {profile.origin}, not measured",)
    return MEASURED, ()


def _at_network(plan: Plan, factor: float) -> float:
    """Return the step's seconds with a network `factor` times as fast."""
    hardware = plan.run.hardware
    other = dataclasses.replace(hardware, network_gb_s=factor * hardware.network_gb_s)
    # parts do not depend on hardware, times do and are known by it
    known = Known(schedules=plan.known.schedules, parts=plan.known.parts)
    return Plan(dataclasses.replace(plan.run, hardware=other), known).step_seconds


def _closes(seconds: float, gap: float) -> float | None:
    return (seconds - gap) / seconds if seconds > gap else None
