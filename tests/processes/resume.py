"""Shared by test_resume.py and other tests."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tests.runs
from app.choices import Score
from app.config import Run
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    FORMAT,
    LATEST,
    MANIFEST,
    manifest_digest,
)
from app.engine.files.run_folder import describe_run, plain
from app.planner.plan import Plan
from app.version import Version
from tests.runs import make_run

Json = dict[str, Any]


# Three layers, 32 wide; 20 steps.
TINY = replace(
    tests.runs.TINY, moe=replace(tests.runs.TINY_MOE, score=Score.sigmoid, bias_update_rate=0.01)
)


RUN = make_run(TINY)


FILE = "rank-00000.safetensors"


def saved(folder: Path, run: Run | Json = RUN, time: float | None = None, step: int = 7) -> Path:
    """A checkpoint of nothing, in the folder of a run, as the newest one there."""
    config = plain(asdict(run)) if isinstance(run, Run) else run
    manifest = {"format": FORMAT, "step": step, "config": config, "files": {FILE: {"bytes": 4}}}
    if time is not None:
        manifest["time"] = time
    checkpoint = folder / CHECKPOINTS / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / FILE).write_bytes(b"full")
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"sha256": manifest_digest(manifest)}))
    (checkpoint.parent / LATEST).write_text(checkpoint.name)
    if isinstance(run, Run):
        describe_run(Plan(run), folder, Version("0.1.0", None, None))
    return checkpoint
