"""Steps beside their plan: said once when they are slow, with the part that most likely is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from app.engine.files.metric_lines import line_of
from app.engine.report.metrics import rank_load
from app.engine.report.pace import (
    SLOWER,
    WINDOW,
    Pace,
    end_line,
    likely_cause,
    pace_line,
    seconds_of_load,
)
from app.engine.step.records import StepReport
from app.plan.cost.times import expected_load
from app.planner.explain import Facts, profile_fits
from app.planner.measured import SETTLING
from app.planner.plan import Plan
from tests.config import load

DENSE = ("+experiment=small", "hardware=h200")
WHOLE = (*DENSE, "cuda_graph=full_iteration")
EXPERTS = (
    "+experiment=smallmoe",
    "hardware=h200",
    "parallel.dp=2",
    "parallel.ep=2",
    "cuda_graph=full_iteration",
    "model.moe.dispatcher=static",
)
NONE = dict.fromkeys(field.name for field in dataclasses.fields(StepReport))


def report(step: int, seconds: float, data_wait: float = 0.0) -> StepReport:
    found = {**NONE, "step": step, "step_ms": 1e3 * seconds, "data_wait_ms": 1e3 * data_wait}
    return StepReport(**found)  # type: ignore[arg-type]


def plan_of(*typed: str) -> Plan:
    return Plan(load(*typed))


def said(pace: Pace, factor: float, steps: int, data_wait: float = 0.0) -> list[str]:
    """Sentences of so many steps that take `factor` times as long as planned."""
    planned = Plan(pace.plan.run).step_seconds
    reports = (report(step, factor * planned, data_wait) for step in range(steps))
    found = (pace.sentence(each, lambda: None) for each in reports)
    return [each for each in found if each]


def test_slow_steps_are_said_once_and_quick_ones_never():
    plan = plan_of(*WHOLE)
    settled = SETTLING + plan.run.cuda_graph.warmup_steps + WINDOW
    assert said(Pace(plan, "NVIDIA H200"), SLOWER - 0.01, 3 * settled) == []
    pace = Pace(plan, "NVIDIA H200")
    assert said(pace, 1.3, settled - 1) == []
    (sentence,) = said(Pace(plan, "NVIDIA H200"), 1.3, 3 * settled)
    assert "30% more" in sentence and "\n" not in sentence
    assert "the GPU" in sentence


def test_one_slow_step_is_not_a_slow_run():
    plan = plan_of(*WHOLE)
    pace = Pace(plan, "NVIDIA H200")
    planned = plan.step_seconds
    for step in range(60):
        slow = 9.0 if step % WINDOW == 0 else 1.0
        assert pace.sentence(report(step, slow * planned), lambda: None) is None


def test_another_gpu_is_not_compared():
    plan = plan_of(*WHOLE)
    assert said(Pace(plan, "NVIDIA H100 80GB HBM3"), 3.0, 60) == []
    assert plan.profile is not None
    assert profile_fits(plan.profile, "NVIDIA H200")
    named = dataclasses.replace(plan.profile, gpu="H100 80GB")
    assert profile_fits(named, "NVIDIA H100 80GB HBM3") and not profile_fits(named, "NVIDIA H100")
    for card in ("NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA H100 PCIe"):  # of lower power
        profile = dataclasses.replace(plan.profile, gpu=card.split()[1])
        assert not profile_fits(profile, card)


def test_nothing_is_compared_with_speeds_that_were_scaled(monkeypatch: pytest.MonkeyPatch):
    run = load(*WHOLE, "hardware=h100")
    name = "NVIDIA H100 80GB HBM3"
    assert said(Pace(Plan(run), name), 3.0, 60)  # measured
    assert run.hardware.profile is not None
    profile = dataclasses.replace(run.hardware.profile, source="scaled from the H200, by memory")
    hardware = dataclasses.replace(run.hardware, profile=profile)
    plan = Plan(dataclasses.replace(run, hardware=hardware))
    assert said(Pace(plan, name), 3.0, 60) == []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    told = str(pace_line(plan, torch.device("cuda", 0)))
    assert "scaled from the H200: not compared" in told and "calibrate measures" in told


def test_no_profile_no_sentence():
    for typed in (("+experiment=small",), (*WHOLE, "precision=fp32")):
        plan = plan_of(*typed)
        assert Pace(plan, "NVIDIA H200").planned is None
        assert said(Pace(plan, "NVIDIA H200"), 3.0, 60) == []
    assert pace_line(plan_of(*WHOLE), torch.device("cpu")) is None


def test_the_line_at_the_start(monkeypatch):
    gpu = torch.device("cuda", 0)
    plan = plan_of(*WHOLE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert "ms per step, by speeds measured on H200" in str(pace_line(plan, gpu))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    told = str(pace_line(plan, gpu))
    assert "is of H200" in told and "NVIDIA B200" in told and "app.cli.calibrate" in told


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("typed", "data_wait", "rows", "cause"),
    [
        (WHOLE, 0.06, None, "the data"),
        (WHOLE, 0.02, None, "the GPU"),
        (DENSE, 0.0, None, "the host"),
        (EXPERTS, 0.0, 2.0, "expert load"),
        (EXPERTS, 0.0, 1.1, "the GPU"),
        (EXPERTS, 0.09, 1.4, "the data"),
        ((*WHOLE, "parallel.tp=4", "hardware.profile.ring_gb_s=30"), 0.0, None, "a link"),
    ],
)
def test_causes(typed: tuple[str, ...], data_wait: float, rows: float | None, cause: str):
    more = 0.1 if rows is None else seconds_of_load(plan_of(*EXPERTS), 2.0)
    assert likely_cause(plan_of(*typed), more, data_wait=data_wait, load=rows).startswith(cause)


def test_load_costs_what_the_plan_says_of_it():
    plan = plan_of(*EXPERTS)
    assert seconds_of_load(plan, expected_load(plan.run)) == pytest.approx(0.0, abs=1e-12)
    once, twice = (seconds_of_load(plan, expected_load(plan.run) + more) for more in (0.25, 0.5))
    assert twice == pytest.approx(2 * once, rel=0.01) and once > 0


def test_rows_of_the_busiest_rank():
    counts_LE = torch.tensor([[4, 0, 2, 2], [1, 1, 3, 3]])
    assert rank_load(counts_LE, 2) == pytest.approx((1.0 + 1.5) / 2)
    assert rank_load(counts_LE, 4) == pytest.approx((2.0 + 1.5) / 2)
    assert rank_load(torch.zeros(0, dtype=torch.int64), 2) is None


def ended(folder: Path, plan: Plan, factor: float, device: str = "NVIDIA H200") -> str | None:
    """The line of a run whose steps took `factor` times as long as planned, from step 100 on, and
    far longer before.
    """
    seconds = plan.step_seconds
    numbers = range(80, 140)
    reports = [
        report(step, seconds * (factor if step >= 100 else 9.0), max(0.0, factor - 1) * seconds)
        for step in numbers
    ]
    rows = [
        {"loss": 1.0, "tokens_per_s": 1.0}
        | {key: getattr(each, key) for key in ("step", "step_ms", "data_wait_ms")}
        for each in reports
    ]
    (folder / "metrics.jsonl").write_text("".join(map(line_of, rows)))
    return end_line(plan, folder, Facts(device), first_step=100)


def test_the_end_names_the_largest_cause_and_the_command(tmp_path: Path):
    plan = plan_of(*WHOLE)
    line = ended(tmp_path, plan, 1.25)
    assert line is not None and "25% more than the" in line and "mostly data wait (+" in line
    assert line.endswith(f"plan explain {tmp_path}")
    assert "25% less" in str(ended(tmp_path, plan, 0.75))
    assert ended(tmp_path, plan, 1.09) is None
    assert ended(tmp_path, plan, 1.25, device="cpu") is None
    assert ended(tmp_path, plan_of("+experiment=small"), 1.25) is None
