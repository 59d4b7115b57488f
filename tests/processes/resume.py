"""Shared by test_resume.py and other tests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import tests.runs
from app.choices import Score
from app.config import Run
from app.engine.checkpoint.load import Progress
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    manifest_digest,
)
from app.engine.files.manifest import FORMAT
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
    needed = {"data": {"tokenizer": "bytes"}, "precision": {"params": "float32"}}
    manifest: Json = {
        "format": FORMAT,
        **asdict(Progress(step, step)),
        "layout": dict.fromkeys(("world_size", *["tp", "cp", "dp", "pp", "etp", "ep", "edp"]), 1),
        "loss_scale": None,
        "config": {**needed, "train": {"seq_len": 16}, **config},
        "files": {FILE: {"bytes": 4, "sha256": hashlib.sha256(b"full").hexdigest(), "dp_rank": 0}},
        "parts": {},
        "routers": {},
    }
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
