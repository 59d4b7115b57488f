"""The commands of docs/checkpoints.md in their order, and what it says about them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.choices import BadStep
from app.config import CheckpointConfig
from app.engine.files.checkpoints import complete_checkpoints, newest_checkpoint
from app.engine.files.run_folder import read_metrics

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs/checkpoints.md").read_text()
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", DOC, re.DOTALL)
    for line in block.splitlines()
]


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, subprocess.CompletedProcess[str]]]:
    """A folder with what a clone has, in which every command was run; and what each has printed."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("app", "conf", "hydra_plugins", "train.py"):
        (folder / name).symlink_to(ROOT / name)
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = {
        line: subprocess.run(
            line, shell=True, cwd=folder, capture_output=True, text=True, timeout=600, env=env
        )
        for line in COMMANDS
    }
    for line, each in done.items():
        assert each.returncode == 0 and "Traceback" not in each.stderr, (
            f"{line}\n{each.stdout}{each.stderr}"
        )
    return folder, done


@pytest.mark.full
def test_one_run_at_four_layouts(told: tuple[Path, dict[str, subprocess.CompletedProcess[str]]]):
    run = told[0] / "runs/a"
    assert [row["step"] for row in read_metrics(run) if "loss" in row] == list(range(1, 31))
    assert [path.name for path in complete_checkpoints(run / "checkpoints")] == [
        "step-00000025",
        "step-00000030",
    ]
    assert newest_checkpoint(told[0] / "runs/b").name == "step-00000030"
    losses = [
        [row["loss"] for row in read_metrics(folder) if "loss" in row][-5:]
        for folder in (run, told[0] / "runs/b")
    ]
    assert losses[0] == losses[1], "the branch has the same steps"
    assert all("resumed" in each.stdout for line, each in told[1].items() if "resume=" in line)


@pytest.mark.full
def test_the_folder_is_as_described(told: tuple[Path, dict[str, subprocess.CompletedProcess[str]]]):
    for path in re.findall(r"^runs/a\S+", DOC, re.MULTILINE):
        assert (told[0] / path).is_file(), path
    manifest = json.loads((told[0] / "runs/a/checkpoints/step-00000030/manifest.json").read_text())
    assert all(set(entry) >= {"bytes", "sha256"} for entry in manifest["files"].values())
    rank, start, stop, part = manifest["parts"]["embedding"]["held"][0]
    assert (rank, start, stop, part[0]) == (0, [0, 0], manifest["parts"]["embedding"]["shape"], 0)
    printed = next(each.stdout for line, each in told[1].items() if line.startswith("python -c"))
    assert {"embedding.main", "embedding.exp_avg", "embedding.exp_avg_sq", "random.cpu"} <= set(
        printed.split()
    )


@pytest.mark.full
def test_a_run_that_diverges_says_what_is_shown(
    told: tuple[Path, dict[str, subprocess.CompletedProcess[str]]],
):
    said = next(each.stderr for line, each in told[1].items() if "1e15" in line)
    measured = r"[\d.]+"
    assert re.sub(measured, "N", said) in re.sub(measured, "N", DOC) and said.count("\n") == 1


def test_every_choice_is_explained():
    for key in CheckpointConfig.__dataclass_fields__:
        assert f"`checkpoint.{key}`" in DOC
    assert all(f"| `{policy.value}` |" in DOC for policy in BadStep)
