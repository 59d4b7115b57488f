"""`graphfold-plan explain RUN` on folders as runs leave them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from app.cli.explain import saved_run
from app.cli.plan import main
from app.engine.files.metric_lines import line_of
from app.engine.files.run_folder import METRICS, PLAN, describe_run
from app.engine.files.trace_sums import PROFILE, write_sums
from app.planner.explain import DATA, LOAD, REST, Facts
from app.planner.measured import TraceSums
from app.planner.plan import Plan
from app.version import Version
from tests.config import load

RUN = (
    "+experiment=smallmoe",
    "hardware=h200",
    "parallel.world_size=2",
    "parallel.ep=2",
    "cuda_graph=full_iteration",
    "model.moe.dispatcher=static",
    "train.steps=40",
)


def run_folder(folder: Path, *typed: str, device: str = "NVIDIA H200", **more: float) -> Plan:
    """Write what a run of 40 steps leaves, of which each takes 10 ms longer than planned."""
    plan = Plan(load(*RUN, *typed))
    folder.mkdir()
    describe_run(plan, folder, Version.of(), Facts(device, {"experts": "one by one"}))
    took = {"loss": 1.0, "tokens_per_s": 1.0, "step_ms": 1e3 * plan.step_seconds + 10}
    rows = [{"step": step, **took, "data_wait_ms": 4.0, **more} for step in range(1, 41)]
    (folder / METRICS).write_text("".join(map(line_of, rows)))
    return plan


def explained(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["explain", *map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def in_json(capsys: pytest.CaptureFixture[str], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(explained(capsys, folder, "--json"))
    return found


def test_rows_of_the_table_add_up(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run_folder(tmp_path / "run", moe_rank_load=1.5)
    write = TraceSums(20, 22, {"GEMMs": 12.5, "communication": 3.25})
    (tmp_path / "run" / PROFILE).mkdir()
    write_sums(tmp_path / "run", write)
    out = explained(capsys, tmp_path / "run")
    found = {
        name.strip(): Decimal(ms.replace(",", ""))
        for name, ms in re.findall(r"^([^\d\n]+?) +([+-]?[\d,]+\.\d+)(?: |$)", out, re.MULTILINE)
    }
    measured, planned = found.pop("measured"), found.pop("planned")
    assert {"GEMMs": found.pop("GEMMs"), "communication": found.pop("communication")} == {
        "GEMMs": Decimal("12.50"),
        "communication": Decimal("3.25"),
    }
    assert {DATA, LOAD, REST} < set(found) and found[DATA] == 4
    assert sum(found.values()) == measured - planned
    assert "1.50 times the mean" in out and "experts: one by one" in out and "note:" not in out


def test_json_has_the_same_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    plan = run_folder(tmp_path / "run")
    found = in_json(capsys, tmp_path / "run")
    assert found["planned"] == pytest.approx(1e3 * plan.step_seconds, abs=0.001)
    causes = {each["name"]: each["ms"] for each in found["causes"]}
    assert causes[DATA] == 4.0 and causes[LOAD] is None
    assert causes[REST] == pytest.approx(6.0, abs=0.002)
    assert found["notes"] == [] and found["steps"]["last"] == 40


def test_the_run_is_planned_on_as_many_processes(tmp_path: Path):
    plan = run_folder(tmp_path / "run")
    assert saved_run(tmp_path / "run").dp == plan.run.dp == 2


def test_notes_say_what_the_plan_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    run_folder(tmp_path / "cpu", "hardware=auto", device="cpu")
    (note,) = in_json(capsys, tmp_path / "cpu")["notes"]
    assert "without measured speeds" in note and "a CPU" in note
    run_folder(tmp_path / "other", device="NVIDIA B200")
    path = tmp_path / "other" / PLAN
    plan = json.loads(path.read_text())
    plan["schedule"]["estimate"]["seconds"] *= 2
    path.write_text(json.dumps(plan))
    of_gpu, of_version = in_json(capsys, tmp_path / "other")["notes"]
    assert "of H200" in of_gpu and "NVIDIA B200" in of_gpu and "plan.json has" in of_version
    path.unlink()
    assert in_json(capsys, tmp_path / "other")["notes"] == []


def mistake(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *map(str, words)])
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and out == "" and err.count("\n") == 1
    return err


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert "explain runs/<name>" in mistake(capsys)
    assert "explain runs/<name>" in mistake(capsys, tmp_path, tmp_path)
    assert "has no config.yaml" in mistake(capsys, tmp_path)
    folder = tmp_path / "run"
    run_folder(folder)
    lines = (folder / METRICS).read_text().splitlines(keepends=True)
    (folder / METRICS).write_text("".join(lines[:5]))
    assert "which are not compared" in mistake(capsys, folder)
    (folder / METRICS).write_text("".join(lines))
    (folder / PROFILE).mkdir()
    write_sums(folder, replace(TraceSums(1, 3), parts={"GEMMs": 1.0}))
    (folder / PROFILE / "sums.json").write_text("{")
    assert "sums.json" in mistake(capsys, folder)
