"""The commands of docs/sweeps.md in their order, and what it says about them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.run_report.sweep_record import JobState

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs/sweeps.md").read_text()
OURS = DOC.partition("## Other sweepers")[0]  # what lies behind is tested in test_hydra_use.py
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", OURS, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with what a clone has, in which every command was run; and what each has printed."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "app").symlink_to(ROOT / "app")
    shutil.copy(ROOT / "train.py", folder)
    shutil.copytree(ROOT / "conf", folder / "conf")
    # a small corpus
    (folder / "conf/data/stdlib.yaml").write_text(
        "source: text\npath: [app/plan/*.py]\ncache_dir: cache\n"
    )
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    outputs = {}
    for line in COMMANDS:
        done = subprocess.run(
            line, shell=True, cwd=folder, capture_output=True, text=True, timeout=600, env=env
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        outputs[line] = done.stdout
    return folder, outputs


@pytest.mark.full
def test_what_the_commands_print(told: tuple[Path, dict[str, str]]):
    first, top_k, again, report, _, runs = told[1].values()
    assert first.startswith("sweep sweeps/dense_tiny-") and re.findall(
        r"\[(\d)/4\].*  done in", first
    ) == ["1", "2", "3", "4"]
    assert ": 4 jobs, 4 done before" in again and "started" not in again
    shown = re.search(r"```\n(sweep sweeps/top_k.*?)```", DOC, re.DOTALL)
    measured = r"\d:\d\d:\d\d|\d\.\d{4}"
    assert shown and re.sub(measured, "N", top_k).startswith(re.sub(measured, "N", shown[1]))
    assert (
        "model.moe.top_k=2" in report
        and "written: sweeps/top_k/report.txt" in report
        and "done" in runs
    )


@pytest.mark.full
def test_what_is_written(told: tuple[Path, dict[str, str]]):
    (sweep,) = (told[0] / "sweeps").glob("dense_tiny-*")
    assert {path.name for path in sweep.iterdir() if path.is_file()} == {
        "sweep.json",
        "report.txt",
        "report.csv",
        "report.html",
    }
    jobs = json.loads((sweep / "sweep.json").read_text())["jobs"]
    assert jobs[0]["folder"] == "0_lr-0.001_weight_decay-0" and f"`{jobs[0]['folder']}/`" in DOC
    assert {"folder", "overrides", "state", "reason", "exit_code", "seconds"} <= set(jobs[0])
    assert all((sweep / job["folder"] / "job.log").exists() for job in jobs)


def test_every_state_is_explained():
    for state in (
        JobState.done,
        JobState.failed,
        JobState.skipped,
        JobState.interrupted,
        JobState.waiting,
    ):
        assert f"`{state.value}`" in DOC
