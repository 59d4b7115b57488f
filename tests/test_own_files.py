"""Files of a run folder are written under their own names only, whatever lies there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app.engine.files.run_folder import CONFIG, METRICS, FolderLock, begin_metrics, read_metrics
from app.engine.report.sinks import JsonLines
from app.engine.step.records import ValidationReport
from app.errors import ConfigError
from app.own_files import fresh_file, make_own, open_own, read_regular, replaced, write_whole

Planted = Callable[[Path, Path], object]
PLANTED: dict[str, Planted] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "link to nothing": lambda path, victim: path.symlink_to(victim.with_name("nothing")),
    "second name": lambda path, victim: path.hardlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
    "file": lambda path, victim: path.write_text("earlier"),
}


def by_savefig(path: Path, text: str) -> None:
    with replaced(path) as temporary:
        temporary.write_text(text)


def by_opening(path: Path, text: str) -> None:
    with fresh_file(path) as file:
        file.write(text.encode())


def in_place(path: Path, text: str) -> None:
    make_own(path)
    with os.fdopen(open_own(path, append=False), "w") as file:
        file.write(text)


@pytest.mark.parametrize("write", [write_whole, by_savefig, by_opening, in_place])
def test_planted_links_and_pipes_are_replaced(write: Callable[[Path, str], None], tmp_path: Path):
    victim = tmp_path / "victim"
    for number, (case, plant) in enumerate(PLANTED.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        victim.write_text("precious")
        plant(folder / "x.png", victim)
        plant(folder / ".x.png.tmp.png", victim)
        write(folder / "x.png", "new")
        assert not (folder / "x.png").is_symlink(), case
        assert (folder / "x.png").read_text() == "new"
        assert victim.read_text() == "precious" and not (tmp_path / "nothing").exists()
        assert victim.stat().st_nlink <= 2 and (folder / "x.png").stat().st_nlink == 1


def test_what_is_opened_is_a_file_of_one_name(tmp_path: Path):
    (tmp_path / "victim").write_text("precious")
    for number, (case, plant) in enumerate(PLANTED.items()):
        plant(path := tmp_path / str(number), tmp_path / "victim")
        if case == "file":
            continue
        with pytest.raises(OSError):
            os.close(open_own(path, append=True))
        if case in ("pipe", "link to nothing"):
            with pytest.raises(OSError):
                read_regular(path)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    with pytest.raises(OSError, match="device"):
        fresh_file(Path("/dev/null"))
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("case", PLANTED)
def test_lock_and_metrics_leave_other_files(case: str, tmp_path: Path):
    """Also where somebody links metrics.jsonl while the run writes, as `cp -al` does."""
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_text('{"step": 1, "val_loss": 1.0}\n')
    run_dir.mkdir()
    if case != "file":
        PLANTED[case](run_dir / CONFIG, victim)
        PLANTED[case](run_dir / METRICS, victim)
    if case == "pipe":
        with pytest.raises(ConfigError, match="Is no regular file"):
            begin_metrics(run_dir, 1)
        (run_dir / METRICS).unlink()
    with FolderLock() as lock, FolderLock() as other:
        lock.take(run_dir)
        (tmp_path / CONFIG).hardlink_to(run_dir / CONFIG)
        with pytest.raises(ConfigError, match="another run is writing there"):
            other.take(run_dir)
        begin_metrics(run_dir, 1)
        sink = JsonLines(run_dir, lambda: pytest.fail("is there"))
        sink.validation(ValidationReport(2, 1.0, 1))
        (tmp_path / "copy").hardlink_to(run_dir / METRICS)
        copied = (tmp_path / "copy").read_text()
        sink.validation(ValidationReport(3, 1.0, 1))
        sink.close()
    assert [row["step"] for row in read_metrics(run_dir)][-2:] == [2, 3]
    assert (tmp_path / "copy").read_text() == copied
    assert victim.read_text() == '{"step": 1, "val_loss": 1.0}\n'
