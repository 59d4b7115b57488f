"""Checkpoints that tests write and read in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.config import Run
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.save import current_state, write_checkpoint
from app.engine.files.checkpoints import check_contents, read_manifest
from app.engine.step.engine import Engine
from app.errors import warn


def cursor_of(sequences: int, rank: int) -> dict[str, Any]:
    """A position in the data that differs by rank."""
    place = {"used": rank, "rate": 1, "credit": 0, "ended": False, "stream": None}
    return {"sequences": sequences, "stream": {"sources": {f"of {rank}": place}}}


def save_checkpoint(
    folder: Path, engine: Engine, run: Run, progress: Progress, cursor: dict[str, Any]
) -> Path:
    """Write and commit a checkpoint; all ranks call it together. Returns its folder.

    Raises ConfigError on every rank when one could not write; what was saved before is then still
    there.
    """
    state = current_state(engine, run, progress, cursor=cursor)
    activity = engine.watchdog.main
    return write_checkpoint(folder, state, engine.groups.host, activity=activity, tell=warn)


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, all files of which have been read and are as they were saved.

    Raises ConfigError.
    """
    manifest = read_manifest(path)
    check_contents(path, manifest, manifest["files"])
    return manifest
