"""The commands of the README, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.options.arguments import Typed
from app.cli.options.compose import load_typed
from app.planner.plan import Plan
from scripts.plan_docs import CONSOLE, refreshed_block

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("python", "torchrun"))
]


BENCHMARKS = (ROOT / "docs/benchmarks.md").read_text()
LAUNCH = next(line for line in COMMANDS if "hardware=h100" in line and "train.py" in line)
MAX_BYTES = 8000


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a clone has; runs/ is its own."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("app", "conf", "docs", "hydra_plugins", "train.py", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_size():
    assert len(README.encode()) <= MAX_BYTES


@pytest.mark.full
@pytest.mark.parametrize("line", [line for line in COMMANDS if line != LAUNCH])
def test_command_runs(checkout: Path, line: str):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        line,
        shell=True,
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_launch_on_gpus_is_planned_as_told():
    """Milliseconds per step and GiB, beside what was measured."""
    planned = Plan(load_typed(Typed.parse(shlex.split(LAUNCH)[2:])))
    told = re.search(r"plan: (\d+) ms per step, ([\d.]+) GiB; measured: (\d+) ms", README)
    assert told and planned.busiest.total / 2**30 == pytest.approx(float(told[2]), abs=0.005)
    assert planned.step_seconds * 1e3 == pytest.approx(int(told[1]), abs=0.5)
    assert f"| 372 ({told[3]} ms), " in (ROOT / "bench/LOG.md").read_text()


def test_speeds_are_those_of_the_benchmarks():
    """Rows beside Megatron-Core: Graphfold, baseline, ratio."""
    page = BENCHMARKS.partition("## Megatron-Core 0.19.2")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|.*\| (\d+) \| (\d+) \| ([\d.]+) × \|$", README, re.MULTILINE)
    assert len(rows) == 4 and "Megatron-Core 0.19.2" in README
    for ours, baseline, ratio in rows:
        found = re.search(rf"\*\*{ours}\*\*[^|]*\| {baseline}\b.*\| {ratio} × \|", page)
        assert found, (ours, baseline, ratio)
        assert int(ours) / int(baseline) == pytest.approx(float(ratio), abs=0.05)


@pytest.mark.full
@pytest.mark.parametrize("block", list(CONSOLE.finditer(README)), ids=lambda block: block[1])
def test_plan_is_up_to_date(block: re.Match[str]):
    """scripts/plan_docs.py renews it."""
    assert refreshed_block(block).splitlines() == block[0].splitlines()


def test_make_targets_exist():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README + CONTRIBUTING, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"train", "gpu", "checks"} <= named <= targets


def test_contributing_names_what_there_is():
    """Files and folders; every folder of tests."""
    paths = re.findall(r"(?:^|[`(\s])((?:tests|app|scripts)/[\w./]+\w)", CONTRIBUTING)
    assert len(paths) >= 8 and [path for path in paths if not (ROOT / path).exists()] == []
    linked = re.findall(r"\]\(([^)#]+)", CONTRIBUTING)
    assert linked and [path for path in linked if not (ROOT / path).exists()] == []
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == set(re.findall(r"`(tests/\w+)`", CONTRIBUTING))
