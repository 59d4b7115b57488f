"""Compare steps with the plan, and name the likely cause if they are slower."""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from app.choices import GraphImpl
from app.engine.files.run_folder import read_metrics
from app.engine.files.trace_sums import read_trace
from app.engine.step.engine import Engine
from app.engine.step.records import StepReport
from app.plan.cost.part_times import EXCHANGE, LAUNCHES
from app.plan.cost.rates import measured
from app.plan.cost.times import expected_load, stage_times
from app.plan.formatting import figures
from app.planner.explain import OFF, Facts, explain, profile_fits
from app.planner.measured import Measurements, settling
from app.planner.plan import Plan
from app.programs import command_name

SLOWER = 1.15  # times the planned step; slower ones are reported
WINDOW = 10  # steps over which the median is taken
MUCH = 0.5  # share of the excess time that a part must explain to be named
MUCH_COMMUNICATION = 0.1  # share of a planned step from which links are suspected


def pace_line(plan: Plan, device: torch.device) -> str | None:
    """Describe the planned step time at the start of a run; None without a measured profile."""
    profile = measured(plan.run)
    if profile is None or device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if not profile_fits(profile, name):
        return (
            f"not compared: hardware.profile is of {profile.gpu}, and this GPU is {name}; "
            f"{command_name('calibrate')} measures it"
        )
    planned = f"{figures(plan.step_seconds * 1e3)} ms per step"
    if profile.scaled:
        told = f"not compared; {command_name('calibrate')} measures this GPU"
        return f"{planned}, by speeds that are {profile.origin}: {told}"
    return f"{planned}, by speeds measured on {profile.gpu}"


def planned_step(plan: Plan, device_name: str) -> str:
    """Return the planned step time in short; empty without a profile of such a GPU."""
    profile = measured(plan.run)
    if profile is None or not profile_fits(profile, device_name):
        return ""
    about = "about " if profile.scaled else ""
    return f"{about}{figures(plan.step_seconds * 1e3)} ms per step"


def pace_of(engine: Engine) -> Pace | None:
    """Build the comparison for an engine on a GPU with a measured profile, else None."""
    if engine.plan.profile is None or engine.device.type != "cuda":
        return None
    return Pace(engine.plan, torch.cuda.get_device_name(engine.device))


class Pace:
    """Comparison of a process's steps with its plan; reports slow steps once."""

    def __init__(self, plan: Plan, device_name: str) -> None:
        self.plan = plan
        profile = plan.profile
        fits = profile is not None and not profile.scaled and profile_fits(profile, device_name)
        self.planned = plan.step_seconds if fits else None
        self.settling = settling(plan.run)
        self.window: deque[StepReport] = deque(maxlen=WINDOW)

    def sentence(self, report: StepReport, load: Callable[[], float | None]) -> str | None:
        """Return the sentence to print after a step, or None.

        `load` returns the tokens of the busiest EP rank over the mean, or None; it is called only
        if needed.
        """
        if self.planned is None:
            return None
        if self.settling:
            self.settling -= 1
            return None
        self.window.append(report)
        if len(self.window) < WINDOW:
            return None
        took = median(each.step_ms for each in self.window) / 1e3
        if took <= SLOWER * self.planned:
            return None
        data_wait = median(each.data_wait_ms for each in self.window) / 1e3
        why = likely_cause(self.plan, took - self.planned, data_wait=data_wait, load=load())
        planned = self.planned
        self.planned = None
        return (
            f"steps take {figures(took * 1e3)} ms, {took / planned - 1:.0%} more than the "
            f"{figures(planned * 1e3)} ms planned; most likely {why}"
        )


def likely_cause(plan: Plan, more: float, data_wait: float, load: float | None) -> str:
    """Name the part that makes steps `more` seconds longer than planned.

    It is the measured part that explains most of them, if it explains at least half; otherwise the
    most suspect part by the plan.
    """
    found = [(data_wait, f"the data: a step waits {figures(data_wait * 1e3)} ms for its batches")]
    if load is not None:
        longer = seconds_of_load(plan, load)
        told = f"expert load: the busiest rank has {load:.2f} times the mean number of tokens"
        found.append((longer, f"{told}; {expected_load(plan.run):.2f} was planned"))
    seconds, said = max(found)
    if seconds >= MUCH * more:
        return said
    kinds = plan.time_by_kind
    launched = plan.run.cuda_graph.impl is not GraphImpl.full_iteration
    if launched and kinds.get(LAUNCHES, 0.0) > 0:
        return "the host, which launches kernels more slowly"
    if kinds.get(EXCHANGE, 0.0) > MUCH_COMMUNICATION * plan.step_seconds:
        groups = f"{command_name('plan')} what=groups"
        return f"a link: communication is much of a step ({groups})"
    if launched:
        return "the host, which launches kernels"
    return "the GPU: its clocks, or another program on it"


def end_line(plan: Plan, run_dir: Path, facts: Facts, first_step: int) -> str | None:
    """Return a line on a run whose steps were over 10 % off its plan, else None.

    None also without a profile measured on such a GPU. Steps from `first_step` on count: those of
    this process.
    """
    profile = plan.profile
    if profile is None or profile.scaled or not profile_fits(profile, facts.device):
        return None
    rows = [row for row in read_metrics(run_dir) if row["step"] >= first_step]
    trace = read_trace(run_dir)
    found = Measurements.of(rows, plan.run, trace)
    told = None if found is None else explain(plan, found, facts, trace)
    if told is None or abs(told.off) <= OFF:
        return None
    way = "more" if told.off > 0 else "less"
    cause = told.largest
    return (
        f"steps took {figures(told.measured)} ms, {abs(told.off):.0%} {way} than the "
        f"{figures(told.planned)} ms planned, mostly {cause.name} ({cause.ms:+,.1f} ms): "
        f"{command_name('plan')} explain {shlex.quote(str(run_dir))}"
    )


def seconds_of_load(plan: Plan, load: float) -> float:
    """Return the seconds that this load adds to a step over the planned load."""
    assert plan.profile is not None
    stages = plan.stages.in_order
    pipeline = plan.stages.pipeline
    loaded = stage_times(plan.run, stages, plan.layout, plan.profile, pipeline=pipeline, load=load)
    per_rank = [0.0] * pipeline.pp
    for stage, times in enumerate(loaded):
        more = sum(times.by_kind().values()) - plan.stage_seconds[stage].total
        per_rank[pipeline.rank(stage)] += more
    return plan.run.num_microbatches * max(per_rank)
