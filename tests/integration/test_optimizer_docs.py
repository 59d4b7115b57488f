"""The commands of docs/optimizer.md, and the numbers that it shows."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from app.choices import Dtype
from app.config import PrecisionConfig
from app.engine.run.run_folder import read_metrics
from app.optim.scale import LossScale

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs/optimizer.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
    for line in block.splitlines()
]
RESULTS = json.loads((ROOT / "bench/results/optimizer_memory.json").read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with what a clone has and a small corpus, in which every command was run; and
    what each has printed.
    """
    folder = tmp_path_factory.mktemp("clone")
    for name in ("app", "hydra_plugins"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "train.py", folder)
    shutil.copytree(ROOT / "conf", folder / "conf")
    (folder / "conf/data/stdlib.yaml").write_text(
        "source: text\npath: [app/plan/*.py]\ncache_dir: cache\n"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    printed = {}
    for line in COMMANDS:
        done = subprocess.run(
            line, shell=True, cwd=folder, capture_output=True, text=True, timeout=600, env=env
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, (
            f"{line}\n{done.stdout}{done.stderr}"
        )
        printed[line] = done.stdout
    return folder, printed


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "runs" / name) if "loss" in row]


@pytest.mark.full
@pytest.mark.parametrize("pair", [("steps", "samples"), ("beside", "behind")])
def test_pairs_of_runs_are_the_same_bits(told: tuple[Path, dict[str, str]], pair: tuple[str, str]):
    first, second = (
        [[row[key] for key in ("loss", "grad_norm", "lr")] for row in steps_of(told[0], name)]
        for name in pair
    )
    assert first == second and len(first) == 10


@pytest.mark.full
def test_the_plan_counts_what_is_held(told: tuple[Path, dict[str, str]]):
    assert re.search(
        r"^optimizer .* 16 → 4\+12/d, d = 8", next(iter(told[1].values())), re.MULTILINE
    )


@pytest.mark.full
def test_an_overflow_skips_the_update_and_the_scale_follows_its_rule(
    told: tuple[Path, dict[str, str]],
):
    rows = steps_of(told[0], "fp16")
    flags = [bool(row["skipped"]) for row in rows]
    assert flags[0] and not all(flags)
    assert [row["loss_scale"] for row in rows] == [scale for scale, _ in trace(flags, 4194304.0)]
    assert len({row["lr"] for row in rows[: flags.index(False) + 1]}) == 1, (
        "the schedule stands still"
    )


def trace(overflows: list[bool], first: float) -> list[tuple[float, int]]:
    """Scale and chances in each step, with a window of 3."""
    config = PrecisionConfig(Dtype.float16, initial_loss_scale=first, loss_scale_window=3)
    scale, seen = LossScale.start(config, torch.device("cpu")), []
    assert scale is not None
    for overflow in overflows:
        seen.append((scale.scale, max(scale.tolerated, 0)))
        scale.update(overflow)
    return seen


def test_the_shown_trace_is_the_rule():
    lines = ("overflow", "scale", "chances")
    overflows, scales, chances = (
        re.search(rf"^{line} +(.*)", DOC, re.MULTILINE)[1].split() for line in lines
    )
    shown = list(zip(map(float, scales), map(int, chances), strict=True))
    assert trace([word == "yes" for word in overflows], 1024.0) == shown


def test_the_memory_table_is_what_was_measured():
    for name in {row["precision"] for row in RESULTS}:
        shown = re.search(
            rf"^\| {name} \| (\d+) → (\d+)\+(\d+)/d \| (\d+)\+(\d+)/d \|(.*)\|$", DOC, re.MULTILINE
        )
        alone, whole, shared, held, held_shared = map(int, shown.groups()[:5])
        assert alone == whole + shared
        dense, experts = (
            [r for r in RESULTS if (r["kind"], r["precision"]) == (kind, name)]
            for kind in ("dense", "experts")
        )
        assert [r["d"] for r in dense] == [r["d"] for r in experts] == [1, 2, 4]
        assert [f"{r['measured']:.3f}" for r in dense] == shown[6].replace("|", " ").split()
        for row in (*dense, *experts):
            assert (
                row["table"] == whole + shared / row["d"]
                and row["plan"] == held + held_shared / row["d"]
            )
            assert row["plan"] <= row["measured"] <= row["plan"] * 1.001
    assert {f"{r['parameters']:,}" for r in RESULTS if r["kind"] == "dense"} == {
        re.search(r"model, ([\d,]+) parameters", DOC)[1]
    }


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "optimizer_memory", ROOT / "bench/optimizer_memory.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_bench_still_measures_that():
    wanted = next(row for row in RESULTS if (row["kind"], row["d"]) == ("dense", 2))
    tool = bench()
    run = tool.load_overrides([*tool.KINDS["dense"][2], *tool.PRECISIONS[wanted["precision"]][0]])
    held = tool.measure_all(run, False)
    assert (
        max(rank.storages + rank.step_counts for rank in held)
        == wanted["storages"] + wanted["step_counts"]
    )
