"""Where a run writes, and what lies there.

runs/<time>-<model>/  config.yaml  plan.json  metrics.jsonl  loss.png  wandb/  checkpoints/{latest, step-00000100/, …}
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from app.config import Run
from app.errors import ConfigError
from app.plan.export import plan_json
from app.plan.plan import Plan

RUNS = Path("runs")
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
PLAN = "plan.json"
METRICS = "metrics.jsonl"
LATEST = "latest"  # file that names the newest complete checkpoint
STEP_PREFIX = "step-"


def choose_folder(run: Run, checkpoint: Path | None, ours: bool = False) -> Path | None:
    """The folder of a run that starts from `checkpoint` (None: anew); None: a new one.

    `ours`: run.run_dir is this run's already. Writes nothing. A run goes on in the folder of its
    checkpoint if that is the folder's newest; from an older one it branches off into a new folder,
    so that what came later stays. Raises ConfigError.
    """
    home = checkpoint.parent.parent if checkpoint is not None and checkpoint.parent.name == CHECKPOINTS else None
    goes_on = home is not None and newest_checkpoint(home) == checkpoint
    if not run.run_dir:
        return home if goes_on else None
    wanted = Path(run.run_dir)
    ours = ours or run.resume == "auto" or (goes_on and home is not None and wanted.resolve() == home.resolve())
    if (wanted / CONFIG).exists() and not ours:
        raise ConfigError("run_dir", wanted, "holds another run", "resume=auto to continue it, or another run_dir")
    return wanted


def create_run_folder(run: Run, chosen: Path | None) -> Path:
    """Make the run folder; for None a new one that no other run can have taken."""
    folder = chosen or _new_folder(RUNS / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{run.model.name}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the run folder for the length of the block. Raises ConfigError when another process has it."""
    with (folder / CONFIG).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError("run_dir", folder, "another run is writing there", "another folder, or once it is over") from error
        except OSError:
            pass  # a file system without locks
        yield


def describe_run(plan: Plan, folder: Path) -> None:
    """Write config.yaml and plan.json."""
    (folder / CONFIG).write_text(OmegaConf.to_yaml(OmegaConf.create(plain(dataclasses.asdict(plan.run)))))
    (folder / PLAN).write_text(json.dumps(plan_json(plan)) + "\n")


def _new_folder(wanted: Path) -> Path:
    for name in (wanted, *(wanted.with_name(f"{wanted.name}-{n}") for n in range(2, 1000))):
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        return name
    raise ConfigError("run_dir", None, f"{wanted} and its successors exist", "another run_dir")


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


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The reports of a run, up to the first line that is not whole, as a killed process may leave its last."""
    path, rows = run_dir / METRICS, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


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
