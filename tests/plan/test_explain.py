"""Steps beside their plan: each injected cause gets its milliseconds, and all rows add up."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from decimal import Decimal
from typing import Any

import pytest

from app.plan.cost.flops import stage_flops
from app.plan.cost.step_time import TAIL_LINKS
from app.plan.cost.times import expected_load
from app.plan.parts.dispatcher import busiest_load
from app.planner.explain import (
    CLOCKS,
    DATA,
    KERNELS,
    LAUNCHED,
    LINKS,
    LOAD,
    OTHERS,
    RERUNS,
    REST,
    Explained,
    Facts,
    LoadedPlan,
    explain,
)
from app.planner.measured import SETTLING, Measurements, TraceSums, settling
from app.planner.plan import Plan
from tests.config import load

EAGER = ("+experiment=small", "hardware=h200", "cuda_graph=none")
EXPERTS = (
    "+experiment=smallmoe",
    "hardware=h200",
    "parallel.dp=2",
    "parallel.ep=2",
    "cuda_graph=full_iteration",
    "model.moe.dispatcher=static",
)
ON_GPU, ON_CPU = Facts("NVIDIA H200"), Facts("cpu")
UNSET = dict.fromkeys(field.name for field in fields(Measurements))


def measured(plan: Plan, more_ms: float = 0.0, **known: Any) -> Measurements:
    """A run whose steps take `more_ms` longer than planned."""
    took = {"step_ms": 1e3 * plan.step_seconds + more_ms, "data_wait_ms": 0.0}
    return Measurements(**{**UNSET, "first": 6, "last": 20, "steps": 15, **took, **known})


def ms_of(told: Explained, name: str) -> float | None:
    (cause,) = (cause for cause in told.causes if cause.name == name)
    return cause.ms


def adds_up(told: Explained) -> bool:
    """Whether the rows add up to the last digit that is shown."""
    rows = sum(Decimal(str(cause.ms or 0.0)) for cause in told.causes)
    return rows == Decimal(str(told.measured)) - Decimal(str(told.planned))


def test_waits_for_data_are_as_long_as_measured():
    plan = Plan(load(*EAGER))
    told = explain(plan, measured(plan, 30.0, data_wait_ms=30.0), ON_GPU)
    assert ms_of(told, DATA) == 30.0 and abs(ms_of(told, REST) or 0.0) < 0.002
    assert told.largest.name == DATA and adds_up(told)


def test_a_skewed_router_costs_what_its_load_costs():
    plan = Plan(load(*EXPERTS))
    even, skewed = (LoadedPlan(plan.run, load=each).step_seconds for each in (1.0, 1.7))
    more = 1e3 * (skewed - plan.step_seconds)
    told = explain(plan, measured(plan, more, rank_load=1.7), ON_GPU)
    assert more > 1 and even < plan.step_seconds < skewed
    assert ms_of(told, LOAD) == pytest.approx(more, abs=0.001)
    assert told.largest.name == LOAD and abs(ms_of(told, REST) or 0.0) < 0.002
    planned = explain(plan, measured(plan, rank_load=expected_load(plan.run)), ON_GPU)
    assert abs(ms_of(planned, LOAD) or 0.0) < 0.001


def test_without_profile_load_costs_its_share_of_flops():
    plan = Plan(load(*EXPERTS, "hardware=auto"))
    assert plan.profile is None
    told = explain(plan, measured(plan, 1000.0, rank_load=2.0, data_wait_ms=100.0), ON_CPU)
    stages, layout = plan.stages.in_order, plan.layout
    planned, found = (
        sum(f.forward + f.backward + f.recompute for f in stage_flops(plan.run, stages, layout, x))
        for x in (busiest_load(plan.run), 2.0)
    )
    computed = 1e3 * plan.step_seconds + 900
    assert ms_of(told, LOAD) == pytest.approx(computed * (1 - planned / found), abs=0.1)


def test_low_clocks_slow_down_arithmetic_alone():
    plan = Plan(load(*EAGER))
    told = explain(plan, measured(plan, gpu_clock=0.5), ON_GPU)
    slow = ms_of(told, CLOCKS)
    assert slow is not None and 0 < slow < 1e3 * plan.step_seconds
    assert slow == pytest.approx(
        1e3 * (LoadedPlan(plan.run, clock=0.5).step_seconds - plan.step_seconds), abs=0.001
    )


def test_a_busy_host_costs_what_its_launches_cost():
    plan = Plan(load(*EAGER, "train.micro_batch=1"))
    host = sum(each.forward_host + each.backward_host for each in plan.stage_times)
    planned = 1e3 * plan.run.num_microbatches * host
    slow = measured(plan, 500.0, launch_ms=3 * planned, device_wait_ms=0.1)
    told = explain(plan, slow, ON_GPU)
    hardware = plan.run.hardware
    assert hardware.profile is not None
    profile = replace(hardware.profile, launch_us=3 * hardware.profile.launch_us)
    slower = Plan(replace(plan.run, hardware=replace(hardware, profile=profile)))
    more = 1e3 * (slower.step_seconds - plan.step_seconds)
    assert more > 1 and ms_of(told, LAUNCHED) == pytest.approx(more, abs=0.001)
    behind = replace(slow, device_wait_ms=0.5 * slow.step_ms)
    assert ms_of(explain(plan, behind, ON_GPU), LAUNCHED) == 0.0
    unknown = explain(plan, replace(slow, launch_ms=None), ON_GPU)
    assert ms_of(unknown, LAUNCHED) is None and adds_up(unknown)


@pytest.mark.parametrize("facts", [ON_GPU, ON_CPU])
def test_others_cost_their_share_of_the_wait_for_cores(facts: Facts):
    plan = Plan(load(*EAGER))
    known = {"host_delay_ms": 40.0, "host_cores": 1.0, "host_others": 3.0, "device_wait_ms": 0.0}
    told = explain(plan, measured(plan, 30.0, **known), facts)
    assert ms_of(told, OTHERS) == 30.0
    idle = measured(plan, 30.0, **known | {"device_wait_ms": 500.0})
    assert ms_of(explain(plan, idle, facts), OTHERS) == (0.0 if facts is ON_GPU else 30.0)


def test_others_on_the_gpu_are_named_at_an_unknown_cost():
    plan = Plan(load(*EAGER))
    for known in ({}, {"host_delay_ms": 4.0, "host_others": 1.0, "device_wait_ms": 500.0}):
        told = explain(plan, measured(plan, 9.0, gpu_others=1.0, **known), ON_GPU)
        (cause,) = (cause for cause in told.causes if cause.name == OTHERS)
        assert cause.ms is None and cause.told.startswith("1 more on the GPU")
    slow = {"host_delay_ms": 4.0, "host_others": 1.0, "device_wait_ms": 0.0}
    assert ms_of(explain(plan, measured(plan, gpu_others=1.0, **slow), ON_GPU), OTHERS) == 4.0


def test_a_trace_tells_links_kernels_and_launches_apart():
    plan = Plan(load(*EXPERTS))
    assert plan.profile is not None
    kinds = plan.times_of_ranks[0]
    links = 1e3 * sum(kinds.get(kind, 0.0) for kind in ("exchanges", *TAIL_LINKS))
    idle = 1e3 * sum(kinds.get(kind, 0.0) for kind in ("launches", "between steps"))
    idle += 1e3 * kinds["idle in the pipeline"]
    compute = 1e3 * plan.step_seconds - links - idle
    trace = TraceSums(3, 5, {}, compute_ms=compute + 7, exchange_ms=links + 11)
    told = explain(plan, measured(plan, 7 + 11 + 13 + 2, data_wait_ms=2.0), ON_GPU, trace)
    found = {name: ms_of(told, name) for name in (KERNELS, LINKS, LAUNCHED)}
    assert found == {
        KERNELS: pytest.approx(7, abs=0.01),
        LINKS: pytest.approx(11, abs=0.01),
        LAUNCHED: pytest.approx(13, abs=0.01),
    }
    assert abs(ms_of(told, REST) or 0.0) < 0.01 and adds_up(told)


def test_slow_paths_without_a_trace_are_named():
    plan = Plan(load(*EAGER))
    told = explain(plan, measured(plan), replace(ON_GPU, slow_paths={"kernels": "plain torch"}))
    (cause,) = (cause for cause in told.causes if cause.name == KERNELS)
    assert cause.ms is None and cause.told == "kernels: plain torch"
    assert ms_of(explain(plan, measured(plan), ON_GPU), KERNELS) == 0.0


def test_rows_add_up_to_the_last_digit():
    draw = random.Random(1)
    plans = [Plan(load(*EXPERTS)), Plan(load(*EXPERTS, "hardware=auto"))]
    for _ in range(40):
        known = {
            "rank_load": draw.uniform(1, 2),
            "gpu_clock": draw.choice([None, draw.uniform(0.3, 1)]),
            "data_wait_ms": draw.uniform(0, 900),
            "host_delay_ms": draw.choice([None, draw.uniform(0, 99)]),
            "host_others": draw.uniform(0, 9),
            "rerun_ms": draw.choice([None, draw.uniform(0, 9)]),
        }
        plan = draw.choice(plans)
        found = measured(plan, draw.uniform(-50, 2000), **known)
        assert adds_up(explain(plan, found, draw.choice([ON_GPU, ON_CPU])))


def row(step: int, ms: float, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 1.0, "step_ms": ms, "data_wait_ms": 1.0, **more}


def test_only_settled_steps_count_and_profiled_ones_do_not():
    run = load("+experiment=small", "log.interval=2")
    first = 1 + settling(run)
    rows = [row(step, 1000.0 if step < first else 10.0) for step in range(1, first + 20)]
    rows[first + 4]["step_ms"] = 500.0
    profiled = TraceSums(first + 5, first + 7)
    found = Measurements.of(rows, run, profiled)
    assert found is not None and (found.first, found.steps) == (first, 17)
    assert found.step_ms == 10.0 and found.data_wait_ms == 1.0 and found.gpu_clock is None
    assert Measurements.of(rows[: first - 1], run) is None
    assert settling(load("+experiment=small", "cuda_graph=none")) == SETTLING


def test_intervals_from_before_settled_steps_do_not_count():
    run = load("+experiment=small", "cuda_graph=none", "log.interval=4")
    rows = [row(step, 10.0) for step in range(1, 17)]
    for number, value in ((4, 9.0), (8, 9.0), (12, 2.0), (16, 4.0)):
        rows[number - 1]["host_delay_ms"] = value
        rows[number - 1]["data_wait_max_ms"] = value
    found = Measurements.of(rows, run)
    assert found is not None and found.host_delay_ms == 3.0 and found.data_wait_ms == 3.0


def test_rerun_steps_cost_what_they_took_beyond_the_others():
    run = load(*EXPERTS)
    first = 1 + settling(run)
    rows = [row(step, 10.0, reruns=0) for step in range(1, first + 10)]
    rows[-1] |= {"step_ms": 40.0, "reruns": 1}
    found = Measurements.of(rows, run)
    assert found is not None and found.rerun_ms == 3.0
    assert ms_of(explain(Plan(run), found, ON_GPU), RERUNS) == 3.0
