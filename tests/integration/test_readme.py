"""The commands of the README, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.plan_docs import CONSOLE, refreshed
from tests.cases import chosen

ROOT = Path(__file__).parent.parent.parent
README, CONTRIBUTING = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("python", "torchrun"))
]


def trains(line: str) -> bool:
    """Whether a command takes longer than a few seconds."""
    return ("train.py" in line or "torchrun" in line) and not line.endswith(
        ("=smoke", "job", "--help")
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a clone has; runs/ is its own."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("app", "conf", "docs", "hydra_plugins", "train.py", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def test_there_are_commands():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", chosen(COMMANDS, [line for line in COMMANDS if not trains(line)]))
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


@pytest.mark.full
@pytest.mark.parametrize("block", list(CONSOLE.finditer(README)), ids=lambda block: block[1])
def test_the_readme_shows_what_comes_out(block: re.Match[str]):
    """scripts/plan_docs.py puts it in anew."""
    assert refreshed(block[0]).splitlines() == block[0].splitlines()


def test_make_targets_exist():
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", README + CONTRIBUTING, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"train", "test", "checks", "help"} <= named <= targets


def test_contributing_names_what_there_is():
    """Files and folders; every folder of tests."""
    paths = re.findall(r"(?:^|[`(\s])((?:tests|app|scripts)/[\w./]+\w)", CONTRIBUTING)
    assert len(paths) >= 8 and [path for path in paths if not (ROOT / path).exists()] == []
    linked = re.findall(r"\]\(([^)#]+)", CONTRIBUTING)
    assert linked and [path for path in linked if not (ROOT / path).exists()] == []
    folders = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders == set(re.findall(r"`(tests/\w+)`", CONTRIBUTING))
