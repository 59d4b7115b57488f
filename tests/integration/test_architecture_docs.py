"""docs/architecture.md: its commands run and pairs of them agree; its memory table is measured."""

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

from app.engine.files.run_folder import read_metrics

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs/architecture.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
    for line in block.splitlines()
]
RESULTS = json.loads((ROOT / "bench/results/optimizer_memory.json").read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with what a clone has and a small corpus, in which every command of the page ran."""
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
    for line in COMMANDS:
        done = subprocess.run(
            line, shell=True, cwd=folder, capture_output=True, text=True, timeout=600, env=env
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, (
            f"{line}\n{done.stdout}{done.stderr}"
        )
    return folder


def steps_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "runs" / name) if "loss" in row]


@pytest.mark.full
def test_overlapped_reduction_is_bit_equal(checkout: Path):
    first, second = (
        [[row[key] for key in ("loss", "grad_norm", "lr")] for row in steps_of(checkout, name)]
        for name in ("overlapped", "after")
    )
    assert first == second and len(first) == 10


def test_memory_table_is_as_measured():
    names = {row["precision"] for row in RESULTS}
    assert len(names) == 3
    for name in names:
        shown = re.search(rf"^\| {name} \| (\d+)\+(\d+)/d \|(.*)\|$", DOC, re.MULTILINE)
        held, held_shared = map(int, shown.groups()[:2])
        dense, experts = (
            [r for r in RESULTS if (r["kind"], r["precision"]) == (kind, name)]
            for kind in ("dense", "experts")
        )
        assert [r["d"] for r in dense] == [r["d"] for r in experts] == [1, 2, 4]
        assert [f"{r['measured']:.3f}" for r in dense] == shown[3].replace("|", " ").split()
        for row in (*dense, *experts):
            assert row["plan"] == held + held_shared / row["d"]
            assert row["plan"] <= row["measured"] <= row["plan"] * 1.001
    assert {f"{r['parameters']:,}" for r in RESULTS if r["kind"] == "dense"} == {
        re.search(r"\(([\d,]+) parameters", DOC)[1]
    }


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "optimizer_memory", ROOT / "bench/optimizer_memory.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bench_measures_the_recorded_memory():
    wanted = next(row for row in RESULTS if (row["kind"], row["d"]) == ("dense", 2))
    tool = bench()
    run = tool.load_overrides([*tool.KINDS["dense"][2], *tool.PRECISIONS[wanted["precision"]][0]])
    held = tool.measure_all(run, False)
    assert (
        max(rank.storages + rank.step_counts for rank in held)
        == wanted["storages"] + wanted["step_counts"]
    )
