"""docs/data.md: from files to a run, and what is said of mistakes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import run_forked
from tests.training import ROOT

pytestmark = pytest.mark.docs

PAGE = (ROOT / "docs/data.md").read_text()


@pytest.mark.full
def test_from_files_to_a_run(tmp_path: Path):
    block, *_ = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    script = block.replace("python train.py", f"python {ROOT / 'train.py'}")
    here = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "this model" in done.stdout and list(tmp_path.glob("runs/*/checkpoints/step-00000010"))


def test_what_is_said_of_files_that_are_not_there(tmp_path: Path):
    (tmp_path / "x.jsonl").touch()
    for path, data in (("corpus/*.txt", "text"), ("x.jsonl", "jsonl")):
        line = [sys.executable, str(ROOT / "train.py"), f"data={data}", f"data.path={path}"]
        done = run_forked(tmp_path, line)
        (told,) = re.findall(rf"`(train\.py: data\.path={re.escape(path)}.*)` \|", PAGE)
        assert done.returncode == 2 and done.stderr.startswith(told), done.stderr
