"""Train a run and read what it has reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class RunError(RuntimeError):
    """End of a run before its last step, other than by a mistake in the configuration."""

    def __init__(self, code: int, message: str, folder: Path | None = None) -> None:
        super().__init__(f"exit code {code}: {message or 'the run ended early'}")
        self.code = code  # exit code of graphfold-train
        self.message = message
        self.folder = folder  # of the run, if it had one


@dataclass(frozen=True, slots=True)
class Result:
    """A run that has taken its last step."""

    folder: Path  # of the run: config.yaml, metrics.jsonl, checkpoints/, …
    loss: float  # of the last training step, nats per token
    validation_loss: float | None  # of the last validation; None without one
    # by name, `step` among them; an entry per reported step, NaN where a step has none
    metrics: dict[str, np.ndarray[Any, Any]] = field(repr=False, compare=False)


def train(overrides: Sequence[str] = ()) -> Result:
    """Train the run that these overrides describe: in this process, or where the layout has several
    ranks as that many processes of this host. Prints what `graphfold-train` prints.

    Raises ConfigError, RunError, and KeyboardInterrupt after Ctrl-C, which saves a checkpoint.
    """
    from app.cli.start.hosted import train_hosted
    from app.engine.files.run_folder import read_metrics

    end = train_hosted(overrides)
    if end.code or end.folder is None:
        raise RunError(end.code, end.said, end.folder)
    return _result(end.folder, read_metrics(end.folder))


def _result(folder: Path, rows: Sequence[dict[str, Any]]) -> Result:
    import numpy as np

    steps: dict[int, dict[str, Any]] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row)
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = {name: np.array([row.get(name, nan) for row in steps.values()]) for name in names}
    losses = [row["loss"] for row in rows if "loss" in row]
    validated = [row["val_loss"] for row in rows if "val_loss" in row]
    return Result(
        folder,
        losses[-1] if losses else nan,
        validation_loss=validated[-1] if validated else None,
        metrics=metrics,
    )
