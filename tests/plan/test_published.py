"""A plan beside a published speed: parts that add up, and an error that is not hidden."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import pytest
import yaml

from app.advice.published import ASSUMED, MEASURED, PARTS, published_gap
from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.cli.plan import main
from app.cli.plan_views.published import gap_lines
from app.errors import ConfigError
from app.plan.cost.flops import run_flops_per_token
from app.plan.cost.part_times import EXCHANGE
from app.plan.parts.trace import Work
from app.planner.plan import Plan
from scripts import published_runs, sheet_profiles
from tests.cases import chosen
from tests.config import load

ONE_NODE = (
    "+experiment=small", "model=llama3_8b", "model.num_layers=4", "hardware=h100",
    "parallel.world_size=8", "parallel.tp=2", "parallel.pp=2", "train.global_batch=16",
    "train.micro_batch=1", "train.seq_len=2048",
)  # fmt: skip
EXPERTS = ("model=qwen3_30b_a3b", "model.num_layers=4", "parallel.ep=4", "parallel.etp=1")


@cache
def planned(*overrides: str) -> Plan:
    return Plan(load(*ONE_NODE, *overrides))


def test_parts_add_up_and_each_closes_the_gap():
    plan = planned()
    speed = published_gap(plan, 1.0).planned_tflops
    for times in (0.95, 1.3):
        found = published_gap(plan, times * speed)
        whole = found.planned_seconds
        assert whole == plan.step_seconds
        assert found.published_seconds == pytest.approx(whole / times)
        assert sum(part.seconds for part in found.parts) == pytest.approx(whole)
        for part in found.parts:
            if part.closes is None:
                assert part.seconds <= found.gap
            else:
                alone = whole + (part.closes - 1) * part.seconds
                assert alone == pytest.approx(found.published_seconds)
    run = plan.run
    tokens = run.train.global_batch * run.train.seq_len / plan.step_seconds / run.world_size
    assert speed == pytest.approx(tokens * run_flops_per_token(run) / 1e12)


def test_every_kind_of_work_has_a_part():
    assert {work.value for work in Work} <= set(PARTS)
    for plan in (planned(), planned(*EXPERTS), planned("precision.fp8.recipe=current")):
        assert set(plan.time_by_kind) <= {*PARTS, EXCHANGE}


def test_collectives_in_layers_are_named_by_the_layout():
    names = [part.name for part in published_gap(planned(), 400.0).parts]
    assert "tp" in names and "pipeline bubble" in names
    names = [part.name for part in published_gap(planned(*EXPERTS), 400.0).parts]
    assert "dispatch of tokens and tp" in names and "experts' GEMMs" in names


def test_error_is_larger_where_less_is_measured():
    measured = published_gap(planned(), 400.0)
    assert measured.errors == MEASURED and not measured.reasons
    assert measured.low_tflops == pytest.approx(measured.planned_tflops / 1.12)
    sheet = published_gap(planned("hardware=a100"), 400.0)
    assert sheet.errors == ASSUMED and "data sheets" in sheet.reasons[0]
    assumed = published_gap(planned("hardware=auto"), 400.0)
    assert assumed.errors == ASSUMED and "no profile" in assumed.reasons[0]
    nodes = published_gap(planned("parallel.gpus_per_node=2"), 400.0)
    assert "network" in nodes.reasons[0] and nodes.errors == MEASURED
    assert nodes.low_tflops < nodes.planned_tflops / 1.13
    assert nodes.high_tflops > nodes.planned_tflops / 0.88


def test_verdict_says_on_which_side_the_number_is():
    plan = planned()
    speed = published_gap(plan, 1.0).planned_tflops
    words = {0.7: "below that range", 1.05: "within that range", 1.4: "above that range"}
    for times, told in words.items():
        found = published_gap(plan, times * speed)
        assert told in gap_lines(found)[2] and found.explained is (times == 1.05)


def test_command_compares(capsys: pytest.CaptureFixture[str]):
    assert main(["compare_to=400", *ONE_NODE, "hardware=a100"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "published 400, planned " in out and "dense GEMMs" in out and "pipeline bubble" in out
    assert "scaled from the H100 by data sheets: not measured" in out


@pytest.mark.full
def test_command_prints_json(capsys: pytest.CaptureFixture[str]):
    assert main(["compare_to=400", *ONE_NODE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["published"]
    assert found == json.loads(json.dumps(dataclasses.asdict(published_gap(planned(), 400.0))))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare_to=0",), "compare_to=0: must be a number above 0"),
        (("compare_to=300", "what=memory"), "what=memory: takes the place of compare_to=: leave"),
    ],
)
def test_mistakes_are_told(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main([*words, *ONE_NODE])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("run", published_runs.RUNS, ids=lambda run: run.name.split(",")[0])
def test_published_flops_per_token_are_ours(run: published_runs.PublishedRun):
    typed = Typed.parse([published_runs._spelled(word) for word in run.overrides])
    ours = run_flops_per_token(load_typed(typed)) / 1e9
    assert ours == pytest.approx(run.tflops * 1e3 / run.tokens, rel=0.01)


@pytest.mark.parametrize("place", chosen(range(len(published_runs.RUNS)), [1]))
def test_page_has_the_plan_of_each_run(place: int):
    run = published_runs.RUNS[place]
    plan = published_runs.plan_of(run)
    gap = published_gap(plan, run.tflops)
    text = published_runs.PAGE.read_text()
    assert "\n".join(published_runs._section(run, plan, gap)) in text
    assert published_runs._row(run, gap) in text.splitlines()
    assert text.startswith(published_runs.HEAD)


@pytest.mark.parametrize("sheet", sheet_profiles.SHEETS, ids=lambda sheet: sheet.name)
def test_profiles_of_data_sheets_are_written(sheet: sheet_profiles.Sheet):
    path = sheet_profiles.HARDWARE / f"{sheet.name}.yaml"
    assert path.read_text() == sheet_profiles.option(sheet)
    plan = planned(f"hardware={sheet.name}", "model.num_layers=2")
    assert plan.profile is not None and plan.profile.scaled
    measured = yaml.safe_load((sheet_profiles.HARDWARE / "h100.yaml").read_text())["profile"]
    ratio = sheet.peak_tflops / 989
    assert plan.profile.gemm_tflops == pytest.approx(ratio * measured["gemm_tflops"], rel=1e-3)
    memory = sheet.memory_gb_s / sheet_profiles.MEASURED_GB_S
    assert plan.profile.optimizer_gb_s == pytest.approx(
        memory * measured["optimizer_gb_s"], rel=1e-3
    )
    assert (plan.profile.fp8_grouped_tflops is not None) is sheet.fp8
    with pytest.raises(ConfigError, match="more than the data sheet's peak"):
        dataclasses.replace(plan.run.hardware, peak_tflops=1.0)
