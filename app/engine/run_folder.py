"""Where a run writes, and which checkpoint it continues from.

runs/<time>-<model>/  config.yaml  metrics.jsonl  loss.png  wandb/  checkpoints/{latest, step-00000100/, …}
"""

from __future__ import annotations

import dataclasses
import time
from enum import Enum
from pathlib import Path

from omegaconf import OmegaConf

from app.config import Run
from app.errors import ConfigError, nearest

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
LATEST = "latest"  # file that names the newest complete checkpoint
STEP_PREFIX = "step-"


def choose_folders(run: Run) -> tuple[Path | None, Path | None]:
    """The run folder (None: a new one) and the checkpoint to start from (None: start anew).

    Writes nothing. A run goes on in the folder of its checkpoint if that is the folder's newest; from an older one it
    branches off into a new folder, so that what came later stays. Raises ConfigError.
    """
    checkpoint = _checkpoint_to_resume(run)
    home = checkpoint.parent.parent if checkpoint is not None and checkpoint.parent.name == CHECKPOINTS else None
    goes_on = home is not None and newest_checkpoint(home) == checkpoint
    if not run.run_dir:
        return (home if goes_on else None), checkpoint
    wanted = Path(run.run_dir)
    ours = run.resume == "auto" or (goes_on and home is not None and wanted.resolve() == home.resolve())
    if (wanted / CONFIG).exists() and not ours:
        raise ConfigError("run_dir", wanted, "holds another run", "resume=auto to continue it, or another run_dir")
    return wanted, checkpoint


def create_run_folder(run: Run, chosen: Path | None) -> Path:
    """Make the run folder, a new one that no other run can have taken for None, and write config.yaml."""
    folder = chosen or _new_folder(RUNS / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{run.model.name}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(plain(dataclasses.asdict(run)))))
    return folder


def _new_folder(wanted: Path) -> Path:
    for name in (wanted, *(wanted.with_name(f"{wanted.name}-{n}") for n in range(2, 1000))):
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        return name
    raise ConfigError("run_dir", None, f"{wanted} and its successors exist", "another run_dir")


def _checkpoint_to_resume(run: Run) -> Path | None:
    if run.resume is None:
        return None
    if run.resume == "auto":
        return newest_checkpoint(Path(run.run_dir)) if run.run_dir else _newest_of_all_runs()
    return _checkpoint_at(Path(run.resume))


def _newest_of_all_runs() -> Path | None:
    found = [newest for folder in RUNS.glob("*") if (newest := newest_checkpoint(folder))]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _checkpoint_at(path: Path) -> Path:
    if path.name.startswith(STEP_PREFIX) and path.is_dir():
        return path
    newest = newest_checkpoint(path.parent if path.name == CHECKPOINTS else path)
    if newest is None:
        known = [str(folder) for folder in RUNS.glob("*") if newest_checkpoint(folder)]
        rule = "holds no complete checkpoint" if path.exists() else "does not exist"
        raise ConfigError("resume", path, rule, nearest(str(path), known) or (known[-1] if known else None))
    return newest


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run folder, None where there is none."""
    pointer = run_dir / CHECKPOINTS / LATEST
    if not pointer.is_file():
        return None
    named = pointer.parent / pointer.read_text().strip()
    # A process that died while replacing it has left it under its hidden name.
    candidates = (named, hidden(named), *reversed(complete_checkpoints(pointer.parent)))
    return next((path for path in candidates if path.is_dir()), None)


def hidden(checkpoint: Path) -> Path:
    """Where a checkpoint waits for its removal, or for the one that replaces it."""
    return checkpoint.with_name(f".{checkpoint.name}.old")


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a `checkpoints` folder, oldest first."""
    return sorted(path for path in folder.glob(f"{STEP_PREFIX}*") if path.is_dir())


def plain(value: object) -> object:
    """Dictionaries, lists, numbers and strings only: enums become what the user typed."""
    match value:
        case Enum():
            return value.value
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return value
