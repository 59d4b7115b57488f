"""Which checkpoint counts where `latest` could not be updated, and does not name the newest one."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.config import CheckpointConfig
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.saver import Saver
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    LATEST,
    fault_of_latest,
    named_by_latest,
    newest_checkpoint,
)
from app.engine.start.start import find_start
from tests.checkpoints import verify_checkpoint
from tests.distributed import run_distributed
from tests.processes.resume import FILE, RUN, saved
from tests.runs import TINY, engine_of, make_run

FAULTS = {"write_synced": errno.ENOSPC, "rename": errno.EPERM, "sync_folder": errno.EIO}


def refusing(operation: Callable[..., Any], number: int) -> Callable[..., Any]:
    """Return the operation, which fails for `latest`, its temporary file, and their folder."""

    def refused(path: Path, *rest: Any) -> Any:
        if path.name in (LATEST, f".{LATEST}.tmp", CHECKPOINTS):
            raise OSError(number, os.strerror(number))
        return operation(path, *rest)

    return refused


def save_thrice(rank: int, root: Path) -> None:
    """For each fault save steps 1 to 3, of which the second cannot be named."""
    run = make_run(TINY, checkpoint=CheckpointConfig(keep_last=2, asynchronous=False))
    engine = engine_of(run)
    for fault, number in FAULTS.items():
        saver, folder = Saver(engine, lambda: None), root / fault / CHECKPOINTS
        for step in (1, 2, 3):
            with pytest.MonkeyPatch.context() as patch:
                if step == 2:
                    owner = Path if fault == "rename" else checkpoint_save
                    patch.setattr(owner, fault, refusing(getattr(owner, fault), number))
                saver.save(folder, Progress(step, step, step), {"sequences": 0})
            shutil.copytree(folder, root / f"{fault}-{step}" / CHECKPOINTS)
            if step == 2:
                saver.name_newest(folder.parent)
                assert named_by_latest(folder).name == "step-00000002"


def test_checkpoint_counts_if_latest_cannot_be_updated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """The run goes on, says so in a line, and names the next one as usual."""
    run_distributed(save_thrice, 1, tmp_path)
    lines = capfd.readouterr().err.splitlines()
    for (fault, number), line in zip(FAULTS.items(), lines, strict=True):
        latest = tmp_path / fault / CHECKPOINTS / LATEST
        why = f"cannot be updated: {os.strerror(number)}"
        said = f"{latest} {why}; step-00000002 is whole, and resume takes it"
        assert line == f"train.py: {said}"
        for step in (1, 2, 3):
            newest = newest_checkpoint(tmp_path / f"{fault}-{step}")
            assert newest is not None and verify_checkpoint(newest)["step"] == step
            stale = fault_of_latest(newest)
            assert (stale is None) == (step != 2)
        assert named_by_latest(latest.parent).name == "step-00000003"


def test_resume_takes_newer_whole_checkpoint_than_latest(tmp_path: Path):
    folder = tmp_path / "a"
    one, two = saved(folder, step=4), saved(folder, step=8)
    (one.parent / LATEST).write_text(one.name)
    start = find_start(replace(RUN, resume="auto", run_dir=str(folder)))
    assert (start.checkpoint, start.run_dir) == (two, folder)
    assert fault_of_latest(two) == f"{one.parent / LATEST} names {one.name}, which is older"
    assert fault_of_latest(one) is None


NOT_NEWER: dict[str, Callable[[Path, Path], object]] = {
    "broken": lambda two, three: (two / FILE).unlink(),
    "a copy under another name": lambda two, three: shutil.rmtree(two),
    "a link": lambda two, three: (shutil.move(two, three), two.symlink_to(three)),
}


@pytest.mark.parametrize("case", NOT_NEWER)
def test_latest_counts_beside_other_folders(case: str, tmp_path: Path):
    one, two = saved(tmp_path / "a", step=4), saved(tmp_path / "a", step=8)
    (one.parent / LATEST).write_text(one.name)
    NOT_NEWER[case](two, tmp_path / "elsewhere")
    if not two.exists():
        shutil.copytree(one, two)
    assert newest_checkpoint(tmp_path / "a") == one
