"""`train.stop_after_worse` ends a run whose validation loss does not fall any more."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from app.config import TrainConfig
from app.engine.files.checkpoints import newest_checkpoint
from app.engine.run.worse import WorseInARow
from app.errors import ConfigError
from tests.distributed import run_distributed
from tests.training import composed, corpus_in, train_rank, untimed


def test_losses_in_a_row_are_counted():
    worse = WorseInARow.after(2, [5.0, 4.0, 4.0])
    assert worse.count == 1 and not worse.ends
    worse.add(math.nan)
    assert worse.ends
    resumed = WorseInARow.after(2, [5.0, 4.0, 4.0, 4.5])
    assert resumed.best == 4.0 and resumed.count == 0  # begins to count anew
    assert not WorseInARow.after(None, [1.0, 2.0, 3.0]).ends


def trained(rank: int, run: object) -> bool:
    return train_rank(rank, run, {})[0]  # type: ignore[arg-type]


@pytest.mark.every(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_ends_and_saves_after_worse_losses(tmp_path: Path, ranks: int):
    """With a learning rate of 0 no loss is lower than the first one."""
    settings = (
        *corpus_in(tmp_path / "corpus"),
        "train.steps=20",
        "train.eval_interval=3",
        "train.stop_after_worse=2",
        "optim.lr=1e-30",
        "optim.min_lr=0",
        "optim.weight_decay=0",
        f"run_dir={tmp_path}/run",
        f"parallel.dp={ranks}",
    )
    assert all(run_distributed(trained, ranks, composed(settings, ranks)))
    rows = untimed(tmp_path / "run")
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 3, 6]
    newest = newest_checkpoint(tmp_path / "run")
    assert newest is not None and newest.name == "step-00000006"
    # typed again, it trains on, and counts anew
    more = composed((*settings, f"resume={tmp_path}/run"), ranks)
    assert all(run_distributed(trained, ranks, more))
    steps = [row["step"] for row in untimed(tmp_path / "run") if "val_loss" in row]
    assert steps == [0, 3, 6, 9, 12]


def test_validations_are_needed():
    with pytest.raises(ConfigError, match=r"stop_after_worse=2: counts validations"):
        TrainConfig(stop_after_worse=2, eval_interval=0)
