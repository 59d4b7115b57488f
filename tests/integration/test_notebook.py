"""The notebook of docs/: its code, cell after cell, in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import graphfold
from tests.training import ROOT

NOTEBOOK = json.loads((ROOT / "docs/python.ipynb").read_text())
# As a notebook runs cells: each line by line, in one namespace, within a running event loop.
CELLS = """
import asyncio, json, sys
async def run():
    names = {}
    for cell in json.loads(sys.argv[1]):
        exec(compile(cell, "cell", "exec"), names)
    found = names["run"]
    print(json.dumps([found.loss, found.metrics["step"].tolist(), str(found.folder)]))
asyncio.run(run())
"""


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs():
    assert NOTEBOOK["nbformat"] == 4 and len(code_cells()) > 4
    for cell in code_cells():
        assert cell["outputs"] == [] and cell["execution_count"] is None
    first = "".join(code_cells()[0]["source"])
    names: dict[str, Any] = {}
    exec(first, names)
    assert names["plan"].fits and isinstance(names["plan"], graphfold.Plan)


@pytest.mark.full
def test_the_notebook_runs(tmp_path: Path):
    cells = json.dumps(["".join(cell["source"]) for cell in code_cells()])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    line = [sys.executable, "-c", CELLS, cells]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loss, steps, folder = json.loads(done.stdout.splitlines()[-1])
    assert steps[-1] == 60 and loss < 3
    assert (tmp_path / folder / "model/config.json").exists()
    assert "'perplexity'" in done.stdout and "Traceback" not in done.stderr
