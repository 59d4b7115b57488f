"""Explain a run's measured step time beside its plan: causes in ms that add up to the difference.

A cause that changes an input of the time model (expert load, clock, speed of launches) costs the
difference of two plans, one with the planned input and one with the measured one, one cause after
the other. Waits are taken as measured. What is left is `unexplained`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from app.choices import GraphImpl
from app.config import HardwareProfile
from app.plan.cost.flops import peak_tflops, stage_flops
from app.plan.cost.part_times import EXCHANGE, LAUNCHES, PartTimes
from app.plan.cost.power import rank_clocks
from app.plan.cost.rates import MICRO
from app.plan.cost.step_time import BETWEEN, IDLE, TAIL_LINKS
from app.plan.cost.times import expected_load, stage_times
from app.plan.formatting import figures
from app.plan.parts.dispatcher import busiest_load, run_dispatcher
from app.planner.measured import Measurements, TraceSums
from app.planner.plan import Plan

MEASURED, ESTIMATED, UNKNOWN = "measured", "estimated", "not known"
CLOCKS, LAUNCHED, DATA = "clocks", "host launches", "data wait"
LOAD, LINKS, KERNELS, OTHERS = "load of experts", "links", "kernels not taken", "other processes"
RERUNS, REST = "steps rerun", "unexplained"
BOUND = 0.05  # share of a step that the host waits for the GPU; above, the GPU sets the pace
OFF = 0.10  # share of the planned step from which a run is explained unasked


@dataclass(frozen=True, slots=True)
class Cause:
    """Part of the difference between the measured and the planned step."""

    name: str
    ms: float | None  # positive if it makes steps longer; None if the records do not tell
    how: str  # MEASURED, ESTIMATED or UNKNOWN
    told: str  # numbers it was found by, or what is missing


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a run that are no metrics, as its plan.json has them."""

    device: str = ""  # name of the GPU, or "cpu"
    slow_paths: Mapping[str, str] = field(default_factory=dict)  # part -> path taken in its place

    @property
    def on_gpu(self) -> bool:
        """Return whether the run used a GPU; True if not recorded."""
        return self.device != "cpu"


@dataclass(frozen=True, slots=True)
class Explained:
    """Measured step time beside the planned one; all in ms."""

    planned: float
    measured: float
    causes: tuple[Cause, ...]  # the last is `unexplained`; their sum is measured − planned

    @property
    def off(self) -> float:
        """Return the difference over the planned time."""
        return self.measured / self.planned - 1

    @property
    def largest(self) -> Cause:
        """Return the cause that contributes most in the direction of the difference."""
        sign = 1 if self.measured >= self.planned else -1
        return max(self.causes, key=lambda cause: sign * (cause.ms or 0.0))


@dataclass(frozen=True)
class LoadedPlan(Plan):
    """Plan of a run in which the experts' load and the GPUs' clock are given."""

    load: float | None = None
    clock: float | None = None

    @cached_property
    def stage_times(self) -> tuple[PartTimes, ...]:
        """Time of one microbatch in each stage at this load and clock."""
        return self.times_at(self.load, self.clock)


def profile_fits(profile: HardwareProfile, device_name: str) -> bool:
    """Return whether a profile was measured on GPUs of this name.

    All words of the profile's name must occur, and the peaks by data sheet must agree, which
    excludes variants of lower power.
    """
    named = set(profile.gpu.upper().split()) <= set(device_name.upper().split())
    return named and peak_tflops(profile.gpu) == peak_tflops(device_name)


def explain(
    plan: Plan,
    found: Measurements,
    facts: Facts | None = None,
    trace: TraceSums | None = None,
) -> Explained:
    """Return the causes of the difference; numbers are rounded so that they add up as shown."""
    planned = plan.step_seconds * 1e3
    digits = 1 if max(planned, found.step_ms) >= 1000 else 3
    causes = [
        replace(cause, ms=None if cause.ms is None else round(cause.ms, digits))
        for cause in _Causes(plan, found, facts or Facts(), trace).all()
    ]
    # a planned step that rounds to 0 would be no base of a ratio
    planned, measured = max(round(planned, digits), 10.0**-digits), round(found.step_ms, digits)
    rest = round(measured - planned - sum(cause.ms or 0.0 for cause in causes), digits)
    causes.append(Cause(REST, rest, ESTIMATED, "measured − planned − the rows above"))
    return Explained(planned, measured, tuple(causes))


@dataclass(frozen=True)
class _Causes:
    plan: Plan
    found: Measurements
    facts: Facts
    trace: TraceSums | None

    def all(self) -> Iterator[Cause]:
        """Yield the causes, those that take effect first before the others."""
        yield self._load()
        yield self._clocks()
        yield self._launches()
        yield self._data()
        yield self._links()
        yield self._kernels()
        yield self._others()
        if self.found.rerun_ms is not None:
            told = "steps whose experts lacked memory, beyond the others"
            yield Cause(RERUNS, self.found.rerun_ms, MEASURED, told)

    @cached_property
    def _with_load(self) -> Plan:
        load = self.found.rank_load
        if self.plan.profile is None or load is None:
            return self.plan
        return LoadedPlan(self.plan.run, self.plan.known, load=load)

    @cached_property
    def _with_clock(self) -> Plan:
        clock = self.found.gpu_clock
        if self.plan.profile is None or clock is None:
            return self._with_load
        return LoadedPlan(self.plan.run, self.plan.known, load=self.found.rank_load, clock=clock)

    def _load(self) -> Cause:
        run, load = self.plan.run, self.found.rank_load
        dispatcher = run_dispatcher(run)
        if dispatcher is None:
            return Cause(LOAD, 0.0, MEASURED, "the model has no experts")
        if dispatcher.ep == 1:
            return Cause(LOAD, 0.0, MEASURED, "every rank has all experts")
        if load is None:
            return Cause(LOAD, None, UNKNOWN, "moe_rank_load was not recorded")
        planned = busiest_load(run) if self.plan.profile is None else expected_load(run)
        told = f"the busiest rank had {load:.2f} times the mean tokens; {planned:.2f} planned"
        if self.plan.profile is not None:
            more = self._with_load.step_seconds - self.plan.step_seconds
            return Cause(LOAD, 1e3 * more, ESTIMATED, told)
        flops = [self._most_flops(each) for each in (planned, load)]
        computed = self.found.step_ms - self.found.data_wait_ms - self._delay
        return Cause(LOAD, computed * (1 - flops[0] / flops[1]), ESTIMATED, told)

    def _most_flops(self, load: float) -> int:
        """Return the FLOPs of a microbatch in the pipeline rank that has most."""
        pipeline = self.plan.stages.pipeline
        stages = stage_flops(self.plan.run, self.plan.stages.in_order, self.plan.layout, load)
        per_rank = [0] * pipeline.pp
        for place, flops in enumerate(stages):
            per_rank[pipeline.rank(place)] += flops.forward + flops.backward + flops.recompute
        return max(per_rank)

    def _clocks(self) -> Cause:
        clock = self.found.gpu_clock
        if not self.facts.on_gpu:
            return Cause(CLOCKS, None, UNKNOWN, "a CPU's clock is not recorded")
        if clock is None:
            return Cause(CLOCKS, None, UNKNOWN, "gpu_clock was not recorded")
        told = f"{clock:.0%} of the highest"
        if self.plan.profile is None:
            return Cause(CLOCKS, None, UNKNOWN, f"{told}; without a profile none is planned")
        flat = stage_times(
            self.plan.run,
            self.plan.stages.in_order,
            self.plan.layout,
            self.plan.profile,
            load=self.found.rank_load,
            known=self.plan.known.parts,
        )
        planned = min(rank_clocks(flat, self.plan.stages.pipeline, self.plan.profile))
        more = self._with_clock.step_seconds - self._with_load.step_seconds
        return Cause(CLOCKS, 1e3 * more, ESTIMATED, f"{told}; {planned:.0%} planned")

    @cached_property
    def _host_bound(self) -> bool | None:
        """Return whether the host, not the GPU, sets the pace; None if not recorded."""
        wait = self.found.device_wait_ms
        if not self.facts.on_gpu:
            return True
        return None if wait is None else wait < BOUND * self.found.step_ms

    def _launches(self) -> Cause:
        found, run, profile = self.found, self.plan.run, self.plan.profile
        if not self.facts.on_gpu:
            return Cause(LAUNCHED, 0.0, MEASURED, "a CPU launches no kernels")
        if self._traced is not None:
            return self._traced_launches(self._traced)
        if run.cuda_graph.impl is GraphImpl.full_iteration:
            return Cause(LAUNCHED, 0.0, ESTIMATED, "all kernels are in a CUDA graph")
        if found.launch_ms is None or self._host_bound is None:
            return Cause(LAUNCHED, None, UNKNOWN, "launch_ms was not recorded")
        dispatcher = run_dispatcher(run)
        if dispatcher is not None and dispatcher.waits_for_host:
            told = "the host waits in every MoE layer; train.profile tells launches apart"
            return Cause(LAUNCHED, None, UNKNOWN, told)
        if not self._host_bound:
            told = f"the host was ready {figures(found.device_wait_ms or 0.0)} ms before the GPU"
            return Cause(LAUNCHED, 0.0, MEASURED, told)
        planned = self._planned_host_ms
        if profile is None or not planned:
            told = f"the host launched for {figures(found.launch_ms)} ms; none is planned"
            return Cause(LAUNCHED, None, UNKNOWN, told)
        took = max(found.launch_ms - self._delay, 0.01 * planned)
        more = self._launched(took / planned) - self._with_clock.step_seconds
        told = f"the host launched for {figures(found.launch_ms)} ms; {figures(planned)} planned"
        return Cause(LAUNCHED, 1e3 * more, ESTIMATED, told)

    @cached_property
    def _planned_host_ms(self) -> float:
        """Return the planned launches of a step on pipeline rank 0, ms."""
        pipeline = self.plan.stages.pipeline
        seconds = sum(
            times.forward_host + times.backward_host
            for place, times in enumerate(self.plan.stage_times)
            if pipeline.rank(place) == 0
        )
        return 1e3 * self.plan.run.num_microbatches * seconds

    def _launched(self, slower: float) -> float:
        """Return the planned seconds of a step whose launches take `slower` times as long."""
        run = self.plan.run
        profile = run.hardware.profile
        assert profile is not None
        profile = replace(profile, launch_us=profile.launch_us * slower)
        run = replace(run, hardware=replace(run.hardware, profile=profile))
        found = self.found
        return LoadedPlan(run, load=found.rank_load, clock=found.gpu_clock).step_seconds

    def _data(self) -> Cause:
        wait = self.found.data_wait_ms
        return Cause(DATA, wait, MEASURED, "time in which a step waited for its batches")

    def _links(self) -> Cause:
        traced = self._traced
        if self.plan.run.world_size == 1:
            return Cause(LINKS, 0.0, MEASURED, "one process")
        if traced is None or traced.exchange_ms is None:
            told = "train.profile measures them" if self.facts.on_gpu else "not measured on a CPU"
            return Cause(LINKS, None, UNKNOWN, told)
        planned = 1e3 * sum(self._planned.get(kind, 0.0) for kind in (EXCHANGE, *TAIL_LINKS))
        told = f"{figures(traced.exchange_ms)} ms beside no kernel; {figures(planned)} planned"
        return Cause(LINKS, traced.exchange_ms - planned, MEASURED, told)

    def _kernels(self) -> Cause:
        paths = "; ".join(f"{part}: {path}" for part, path in self.facts.slow_paths.items())
        traced = self._traced
        if traced is None or traced.compute_ms is None:
            if not paths and self.facts.device:
                return Cause(KERNELS, 0.0, MEASURED, "all fast paths were taken")
            return Cause(KERNELS, None, UNKNOWN, paths or "not recorded")
        took, planned = self._traced_compute(traced), self._planned_compute
        told = f"kernels take {figures(took)} ms; {figures(planned)} planned"
        return Cause(KERNELS, took - planned, MEASURED, f"{told}; {paths}" if paths else told)

    def _others(self) -> Cause:
        found = self.found
        told = []
        if self.facts.on_gpu and found.gpu_others:
            told.append(f"{found.gpu_others:.3g} more on the GPU, at a cost not known")
        if found.host_delay_ms is None or found.host_others is None:
            told.append("host_delay_ms was not recorded")
            return Cause(OTHERS, None, UNKNOWN, "; ".join(told))
        told.append(
            f"the training thread waited {figures(found.host_delay_ms)} ms for a core, while "
            f"others had {found.host_others:.1f} and the run {found.host_cores or 0.0:.1f}"
        )
        if not self._host_bound:
            told.append("the GPU had work meanwhile")
        known = self._delay > 0 or not (self.facts.on_gpu and found.gpu_others)
        return Cause(
            OTHERS,
            self._delay if known else None,
            ESTIMATED if known else UNKNOWN,
            "; ".join(told),
        )

    @cached_property
    def _delay(self) -> float:
        """Return ms in which other processes held the training thread's core, as far as that cost
        time.
        """
        found = self.found
        if not found.host_delay_ms or not found.host_others or not self._host_bound:
            return 0.0
        busy = found.host_others + (found.host_cores or 0.0)
        return found.host_delay_ms * found.host_others / busy

    @cached_property
    def _traced(self) -> TraceSums | None:
        """Return the profiled kernels if the plan has times for them."""
        trace = self.trace
        usable = trace is not None and trace.compute_ms is not None
        return trace if usable and self.plan.profile is not None else None

    @cached_property
    def _planned(self) -> Mapping[str, float]:
        """Return the planned seconds by kind of work of pipeline rank 0, at the measured load and
        clock.
        """
        return self._with_clock.times_of_ranks[0]

    @cached_property
    def _planned_compute(self) -> float:
        idle = (EXCHANGE, LAUNCHES, IDLE, BETWEEN, *TAIL_LINKS)
        return 1e3 * sum(each for kind, each in self._planned.items() if kind not in idle)

    def _traced_compute(self, trace: TraceSums) -> float:
        """Return ms of compute kernels with the gaps between them, which the plan counts too."""
        assert self.plan.profile is not None and trace.compute_ms is not None
        return trace.compute_ms + trace.kernels * self.plan.profile.kernel_us * MICRO * 1e3

    def _traced_launches(self, trace: TraceSums) -> Cause:
        """Return the time in which the GPU had no kernel, beyond what was planned and waited."""
        found = self.found
        if self.plan.layout.pp > 1:
            return Cause(LAUNCHED, None, UNKNOWN, "pipeline ranks also idle for one another")
        idle = found.step_ms - self._traced_compute(trace) - (trace.exchange_ms or 0.0)
        planned = 1e3 * sum(self._planned.get(kind, 0.0) for kind in (LAUNCHES, BETWEEN, IDLE))
        told = f"the GPU had nothing to do for {figures(idle)} ms; {figures(planned)} planned"
        more = idle - planned - found.data_wait_ms - self._delay
        return Cause(LAUNCHED, more, MEASURED, told)
