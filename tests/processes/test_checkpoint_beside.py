"""Saving beside training: what is saved, who waits for it, and what a full disk costs, there as
where saving blocks.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.choices import Score
from app.config import CheckpointConfig, ParallelConfig, Run
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.checkpoint.saver import Saver
from app.engine.files.checkpoints import CHECKPOINTS, complete_checkpoints, newest_checkpoint
from app.engine.files.run_folder import read_metrics
from app.engine.step.engine import Engine
from app.errors import ConfigError
from tests.checkpoints import cursor_of, verify_checkpoint
from tests.distributed import run_distributed
from tests.runs import TINY, TINY_MOE, engine_of, make_run, train_steps
from tests.training import composed, corpus_in, train_rank

BIASED = dataclasses.replace(
    TINY, moe=dataclasses.replace(TINY_MOE, score=Score.sigmoid, bias_update_rate=0.01)
)


def run_of(asynchronous: bool = True, **options: Any) -> Run:
    return make_run(
        BIASED,
        parallel=ParallelConfig(world_size=2, dp=2, ep=2),
        checkpoint=CheckpointConfig(asynchronous=asynchronous, **options),
    )


def held_up() -> tuple[threading.Event, list[str]]:
    """Have every write of this process wait for the event; the names of the files written."""
    goes, write, names = threading.Event(), checkpoint_save.write_synced, []

    def write_when_told(path: Path, content: Callable[..., object]) -> dict[str, Any]:
        assert goes.wait(60)
        names.append(path.name)
        return write(path, content)

    checkpoint_save.write_synced = write_when_told  # this process is about to end
    return goes, names


def state_of(engine: Engine) -> list[torch.Tensor]:
    """All that training changes, the next random numbers among it."""
    random = torch.get_rng_state()
    tensors = [
        value.clone()
        for piece in engine.optimizer.param_shards()
        for value in (*piece.state.values(), piece.step)
    ]
    tensors += [router.bias_E.clone() for _, router in engine.routers()]
    return [*tensors, random]


def train_while_writing(rank: int, run: Run, folder: Path) -> dict[str, bool]:
    goes, names = held_up()
    engine = engine_of(run, rank)
    saver = Saver(engine, lambda: None)
    train_steps(run, engine, 2)
    torch.rand(rank + 1)
    wanted = state_of(engine)
    path = saver.save(folder, Progress(2, 2, 99), cursor_of(16, rank))
    train_steps(run, engine, 2, first=2)
    torch.rand(7)
    unwritten = not names and newest_checkpoint(folder.parent) is None
    changed = not any(torch.equal(a, b) for a, b in zip(wanted, state_of(engine), strict=True))
    goes.set()
    saver.wait()
    fresh = engine_of(run, rank)
    loaded = load_checkpoint(path, verify_checkpoint(path), fresh)
    same = all(torch.equal(a, b) for a, b in zip(wanted, state_of(fresh), strict=True))
    return {
        "training went on": unwritten,
        "and changed all": changed,
        "saved as it was": same,
        "progress and cursor": loaded == (Progress(2, 2, 99), cursor_of(16, rank)),
    }


def test_what_is_saved_is_the_state_of_that_step(tmp_path: Path):
    for found in run_distributed(train_while_writing, 2, run_of(), tmp_path / CHECKPOINTS):
        assert found == dict.fromkeys(found, True)


def save_in_a_row(rank: int, run: Run, folder: Path) -> list[tuple[bool, list[str]]]:
    """Save twice; return whether the second save came back before and after the first was written.

    Also return what was written by then.
    """
    goes, names = held_up()
    saver = Saver(engine_of(run, rank), lambda: None)
    saver.save(folder, Progress(1, 1, 1), {"sequences": 0})
    second = threading.Thread(
        target=lambda: saver.save(folder, Progress(2, 2, 2), {"sequences": 0})
    )
    second.start()
    second.join(0.3)
    seen = [(second.is_alive(), list(names))]
    goes.set()
    second.join(60)
    seen.append((second.is_alive(), sorted(path.name for path in complete_checkpoints(folder))[:1]))
    saver.wait()
    return seen


def test_one_at_most_is_under_way(tmp_path: Path):
    for found in run_distributed(save_in_a_row, 2, run_of(), tmp_path / CHECKPOINTS):
        assert found == [(True, []), (False, ["step-00000001"])]


def blocked_times(rank: int, run: Run, folder: Path) -> list[float | None]:
    saver = Saver(engine_of(run, rank), lambda: None)
    seen = [saver.blocked()]
    for step in (1, 2):
        saver.save(folder, Progress(step, step, step), {"sequences": 0})
        seen.append(saver.blocked())
    saver.wait()
    return [*seen, saver.blocked()]


def test_time_blocked_by_saving_is_reported_once(tmp_path: Path):
    for first, one, two, last in run_distributed(
        blocked_times, 2, run_of(), tmp_path / CHECKPOINTS
    ):
        assert first is None and last is None and one > 0 and two > 0


def save_until_full(rank: int, run: Run, folder: Path, full: str) -> tuple[str, bool]:
    """Save twice; for the second the disk has no room for a file. What is raised, and whether
    the others were asked to stop.
    """
    write, asked = checkpoint_save.write_synced, []

    def write_to_a_full_disk(path: Path, content: Callable[..., object]) -> dict[str, Any]:
        found = write(path, content)
        if path.name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return found

    saver = Saver(engine_of(run, rank), lambda: asked.append(True))
    saver.save(folder, Progress(1, 1, 1), {"sequences": 0})
    saver.wait()
    checkpoint_save.write_synced = write_to_a_full_disk
    try:
        saver.save(folder, Progress(2, 2, 2), {"sequences": 0})
        saver.wait()
    except ConfigError as error:
        return str(error), bool(asked)
    return "saved", bool(asked)


@pytest.mark.every(3)
@pytest.mark.parametrize("full", ["rank-00001.safetensors", "manifest.json"])
def test_full_disk_is_reported_on_all_ranks(full: str, tmp_path: Path):
    """Saving beside training says what saving in between says, and asks for a stop."""
    told = {}
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous) / CHECKPOINTS
        results = run_distributed(save_until_full, 2, run_of(asynchronous), folder, full)
        assert results == [(results[0][0], asynchronous)] * 2
        told[asynchronous] = results[0][0].replace(str(asynchronous), "…")
        assert verify_checkpoint(newest_checkpoint(folder.parent))["step"] == 1, (
            "what was saved before is still there"
        )
        assert [path.name for path in folder.glob(".step*")] == [], (
            "and the failed one takes no room"
        )
    who = "rank 1: " if "rank" in full else ""
    said = (
        f"run_dir={tmp_path}/…: step-00000002 could not be saved, {who}[Errno 28] No space left "
        "on device"
    )
    assert told[True] == told[False] and told[True].startswith(said)
    assert "; step-00000001 is the newest that was saved; make room there" in told[True]


def train_until_full(rank: int, run: Run, step: int) -> str:
    """A whole run for which the disk is full when it saves that step."""
    write = checkpoint_save.write_synced

    def write_until_full(path: Path, content: Callable[..., object]) -> dict[str, Any]:
        found = write(path, content)
        if f"{step:08d}" in path.parent.name and path.name == "rank-00001.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return found

    checkpoint_save.write_synced = write_until_full
    try:
        train_rank(rank, run, {})
    except ConfigError as error:
        return str(error)
    return "trained"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


@pytest.mark.every(4)
@pytest.mark.parametrize(("step", "asynchronous"), [(4, True), (4, False), (8, True), (8, False)])
def test_a_run_ends_with_the_first_step_after_a_full_disk(
    corpus: tuple[str, ...], tmp_path: Path, step: int, asynchronous: bool
):
    """All ranks at once, also where nothing comes after the save."""
    overrides = (
        "parallel.dp=2",
        "train.steps=8",
        "checkpoint.interval=2",
        f"checkpoint.asynchronous={asynchronous}",
    )
    run = composed((*corpus, *overrides, f"run_dir={tmp_path}/run"), 2)
    results = run_distributed(train_until_full, 2, run, step)
    assert (
        results[0] == results[1]
        and f"step-{step:08d} could not be saved, rank 1: [Errno 28]" in results[0]
    )
    assert verify_checkpoint(newest_checkpoint(tmp_path / "run"))["step"] == step - 2
    last = max(row["step"] for row in read_metrics(tmp_path / "run") if "loss" in row)
    assert last == step if not asynchronous else step <= last <= step + 2, (
        "at the latest where the next save would begin"
    )


def train_slowly_written(rank: int, run: Run, told_at: dict[int, int]) -> tuple[bool, str]:
    """A run whose files take long to write; what it says it has saved."""
    write = checkpoint_save.write_synced

    def write_late(path: Path, content: Callable[..., object]) -> dict[str, Any]:
        threading.Event().wait(0.2)
        return write(path, content)

    checkpoint_save.write_synced = write_late
    finished, _ = train_rank(rank, run, told_at)
    return finished, os.fspath(newest_checkpoint(Path(run.run_dir)).name)


@pytest.mark.every(2)
@pytest.mark.parametrize(("told_at", "step"), [({}, 4), ({1: 3}, 3)], ids=["end", "signal"])
def test_the_last_one_is_waited_for(
    corpus: tuple[str, ...], tmp_path: Path, told_at: dict[int, int], step: int
):
    run = composed((*corpus, "parallel.dp=2", "train.steps=4", f"run_dir={tmp_path}/run"), 2)
    assert (
        run_distributed(train_slowly_written, 2, run, told_at)
        == [(not told_at, f"step-{step:08d}")] * 2
    )


def keep_some(rank: int, run: Run, folder: Path) -> list[str]:
    saver = Saver(engine_of(run), lambda: None)
    for step in (10, 20, 30, 40, 45, 50):
        saver.save(folder, Progress(step, step, step), {"sequences": 0})
    saver.wait()
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_some_are_kept_for_ever(tmp_path: Path):
    """The multiples of `keep_every`, and the two newest; 45 is where a signal stopped the run."""
    run = make_run(TINY, checkpoint=CheckpointConfig(interval=10, keep_last=2, keep_every=20))
    assert run_distributed(keep_some, 1, run, tmp_path / CHECKPOINTS) == [
        [f"step-{step:08d}" for step in (20, 40, 45, 50)]
    ]
    with pytest.raises(
        ConfigError,
        match=r"checkpoint.keep_every=25: must be a multiple of checkpoint.interval=10.*20 or 30",
    ):
        CheckpointConfig(interval=10, keep_every=25)
