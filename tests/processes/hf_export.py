"""Shared by test_hf_export.py and other tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from app.config import Run
from app.engine.build import build_engine
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.export.export import export_together
from app.engine.files.checkpoints import CHECKPOINTS, read_manifest
from app.engine.ranks.groups import create_groups
from app.engine.start.start import find_pretrained
from app.planner.plan import Plan
from tests.checkpoints import save_checkpoint
from tests.distributed import run_distributed
from tests.runs import make_run, train_steps, with_model


def engine_from(rank: int, run: Run, start: str | None) -> Any:
    """The engine of a rank with weights of the run's model, or of a checkpoint."""
    plan = Plan(run)
    groups = create_groups(plan.layout, rank)
    pretrained = find_pretrained(run) if run.model.init_from and start is None else None
    engine = build_engine(plan, groups, torch.device("cpu"), pretrained=pretrained)
    if start is not None:
        load_checkpoint(Path(start), read_manifest(Path(start)), engine)
    return engine


def saved(rank: int, run: Run, folder: Path, start: str | None = None, steps: int = 0) -> str:
    """Save a checkpoint of a run after so many steps; returns where."""
    engine = engine_from(rank, run, start)
    if steps:
        train_steps(run, engine, steps)
    progress = Progress(step=max(1, steps))
    return str(save_checkpoint(folder / CHECKPOINTS, engine, run, progress, {"sequences": 0}))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def exported_together(rank: int, run: Run, folder: Path) -> str:
    path = saved(rank, run, folder, steps=2)
    engine = engine_from(rank, run, path)
    export_together(Path(path), folder / "out", engine.groups, engine.watchdog.main)
    return path


DENSE = with_model(make_run(), moe=None, tie_embeddings=True)


def a_checkpoint(folder: Path, run: Run) -> Path:
    (path,) = run_distributed(saved, 1, run, folder)
    return Path(path)
