"""A process that dies at any moment of a save loses no committed checkpoint; the next run resumes.

The moments: before and after every operation on the disk and every copy of the state, and in the
middle of those that take time, in the training thread as in the one that writes beside it. At first
everything is one process with a tiny model; at the end one of two ranks dies. What a power cut may
take away is not simulated; the order of the syncs is checked instead.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.config import CheckpointConfig, ParallelConfig
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.saver import Saver
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    LATEST,
    complete_checkpoints,
    newest_checkpoint,
)
from app.engine.ranks.groups import process_world
from tests.cases import chosen
from tests.checkpoints import verify_checkpoint
from tests.forks import Process
from tests.runs import TINY, engine_of, make_run

DEAD = 17  # exit status of a killed child
RUN = make_run(TINY)


class Reaper:
    """Counts the moments of a save and ends the process at the one asked for."""

    def __init__(self, deadline: int | None, log: Path) -> None:
        self.deadline, self.log, self.passed = deadline, log, 0

    def moment(self, name: str) -> None:
        if self.passed == self.deadline:
            self.log.write_text(name)
            os._exit(DEAD)
        self.passed += 1

    def around(
        self, name: str, operation: Callable[..., Any], torn: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        """`operation` with a moment before and after it; `torn` leaves what an interrupted one
        would, with its own moments.
        """

        def watched(*args: Any, **options: Any) -> Any:
            label = f"{name}({', '.join(arg.name for arg in args if isinstance(arg, Path))})"
            self.moment(f"before {label}")
            if torn is not None and self.deadline is not None:
                torn(f"in the middle of {label}", *args)
            result = operation(*args, **options)
            self.moment(f"after {label}")
            return result

        return watched

    def half_written(self, name: str, path: Path, write: Callable[[io.BytesIO], object]) -> None:
        whole = io.BytesIO()
        write(whole)
        path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
        self.moment(name)

    def half_removed(self, name: str, folder: Path) -> None:
        for file in sorted(folder.glob("*")):  # the manifest first
            file.unlink()
            self.moment(f"{name}, {file.name} is gone")

    def watch(self) -> None:
        """Patch what a save calls; this process is about to end anyway."""
        checkpoint_save.write_synced = self.around(
            "write", checkpoint_save.write_synced, self.half_written
        )
        checkpoint_save.sync_folder = self.around("sync", checkpoint_save.sync_folder)
        Saver._copied = self.around("copy", Saver._copied)
        shutil.rmtree = self.around("remove", shutil.rmtree, self.half_removed)
        Path.rename = self.around("rename", Path.rename)
        Path.mkdir = self.around("mkdir", Path.mkdir)


@dataclass(frozen=True)
class Scenario:
    """A save that may be interrupted."""

    before: tuple[int, ...]  # steps already committed, in this order
    step: int
    keep_last: int
    asynchronous: bool = False


SCENARIOS = {
    "first": Scenario((), 1, 2),
    "next": Scenario((1, 2), 3, 2),
    "replaces the only other": Scenario((1,), 2, 1),
    "same step again": Scenario((1, 2), 2, 2),
    "same step again, the only one": Scenario((1,), 1, 1),
    "first, beside training": Scenario((), 1, 2, asynchronous=True),
    "replaces the only other, beside training": Scenario((1,), 2, 1, asynchronous=True),
    "same step again, beside training": Scenario((1, 2), 2, 2, asynchronous=True),
}
QUICK = (SCENARIOS["replaces the only other, beside training"],)


def in_child(work: Callable[[], None]) -> int:
    """Exit status of a forked process that does `work`."""

    def child() -> None:
        with process_world(0, 1, torch.device("cpu")):
            work()

    process = Process(target=child)
    process.start()
    process.join(60)
    return process.exitcode


def save(folder: Path, step: int, tokens: int, keep_last: int, asynchronous: bool = False) -> None:
    config = CheckpointConfig(keep_last=keep_last, asynchronous=asynchronous)
    saver = Saver(engine_of(dataclasses.replace(RUN, checkpoint=config)), lambda: None)
    saver.save(folder, Progress(step, step, tokens), {"sequences": 0})
    saver.wait()


def interrupted(scenario: Scenario, folder: Path, deadline: int, log: Path) -> bool:
    """Run the scenario's save up to a moment; whether there was such a moment. Old checkpoints
    have 1 token, the new one 2.
    """

    def work() -> None:
        Reaper(deadline, log).watch()
        save(
            folder,
            scenario.step,
            2,
            keep_last=scenario.keep_last,
            asynchronous=scenario.asynchronous,
        )

    return in_child(work) == DEAD


@pytest.fixture(scope="module", params=chosen(SCENARIOS.values(), QUICK), ids=SCENARIOS)
def deaths(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Scenario, dict[str, Path]]:
    """The scenario and, for every moment of it, the run folder that a death at that moment
    leaves.
    """
    scenario, root, left = request.param, tmp_path_factory.mktemp("deaths"), {}
    start, log = root / "start" / CHECKPOINTS, root / "moment"
    start.mkdir(parents=True)
    assert in_child(lambda: [save(start, step, 1, keep_last=9) for step in scenario.before]) == 0
    for deadline in range(100):
        run_dir = root / f"run-{deadline}"
        shutil.copytree(start.parent, run_dir)
        if not interrupted(scenario, run_dir / CHECKPOINTS, deadline, log=log):
            break
        left[f"{deadline} {log.read_text()}"] = run_dir
    assert len(left) > 15
    return scenario, left


def tokens_of(path: Path) -> int:
    return verify_checkpoint(path)["tokens"]


def faults(left: dict[str, Path], find: Callable[[Path], str | None]) -> list[str]:
    """Collect, with its moment, what `find` reports about each folder left behind."""
    return [f"{moment}: {fault}" for moment, run_dir in left.items() if (fault := find(run_dir))]


@pytest.mark.full
def test_the_newest_checkpoint_is_whole(deaths: tuple[Scenario, dict[str, Path]]):
    scenario, left = deaths

    def find(run_dir: Path) -> str | None:
        newest = newest_checkpoint(run_dir)
        if newest is None:
            return "nothing to continue from" if scenario.before else None
        step = verify_checkpoint(newest)["step"]
        return None if step >= max(scenario.before, default=0) else f"fell back to step {step}"

    assert faults(left, find) == []


def test_latest_moves_once_and_last(deaths: tuple[Scenario, dict[str, Path]]):
    scenario, left = deaths
    names = [
        pointer.read_text() if (pointer := run_dir / CHECKPOINTS / LATEST).is_file() else ""
        for run_dir in left.values()
    ]
    old = f"step-{scenario.before[-1]:08d}" if scenario.before else ""
    new = f"step-{scenario.step:08d}"
    moved = names.index(new) if new in names else len(names)
    assert names == [old] * moved + [new] * (len(names) - moved)
    if new != old:
        assert "after rename(.latest.tmp" in list(left)[moved]


def test_what_a_rename_shows_is_on_the_disk_before(deaths: tuple[Scenario, dict[str, Path]]):
    _, left = deaths
    names = [moment.split(" ", 1)[1] for moment in left]
    for index, name in enumerate(names):
        if name.startswith("before rename(.step-") and ".tmp," in name:
            temporary = name.removeprefix("before rename(").split(",")[0]
            assert f"after sync({temporary})" in names[:index], "entries of the temporary folder"
        if name.startswith("before rename(.latest.tmp"):
            assert f"after sync({CHECKPOINTS})" in names[:index], "the checkpoint that it will name"
    assert names[-1].startswith("after")


def test_every_checkpoint_that_is_offered_is_whole(deaths: tuple[Scenario, dict[str, Path]]):
    _, left = deaths

    def find(run_dir: Path) -> str | None:
        for path in complete_checkpoints(run_dir / CHECKPOINTS):
            try:
                tokens_of(path)
            except ValueError as error:
                return str(error)
        return None

    assert faults(left, find) == []


@pytest.mark.every(2)
@pytest.mark.parametrize("later", [0, 1], ids=["same step", "next step"])
def test_next_run_saves_and_removes_leftovers(
    deaths: tuple[Scenario, dict[str, Path]], later: int, tmp_path: Path
):
    scenario, left = deaths
    log = tmp_path / "faults"

    def again() -> None:
        found = {}
        for moment, run_dir in left.items():
            copy = shutil.copytree(run_dir, tmp_path / run_dir.name)
            try:
                save(copy / CHECKPOINTS, scenario.step + later, 3, keep_last=scenario.keep_last)
                if tokens_of(newest_checkpoint(copy)) != 3:
                    found[moment] = "is not the newest"
                if hidden := [path.name for path in (copy / CHECKPOINTS).glob(".*")]:
                    found[moment] = f"leaves {hidden}"
            except (OSError, ValueError) as error:
                found[moment] = repr(error)
        log.write_text(json.dumps(found))

    assert in_child(again) == 0
    assert json.loads(log.read_text()) == {}


# One of two ranks dies; nobody kills the other, whose writer must find out by itself.


def two_ranks(work: Callable[[int], None], folder: Path) -> list[int]:
    """Exit statuses of two forked ranks that do `work(rank)`."""

    def child(rank: int) -> None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the survivor's traceback
        store = dist.FileStore(str(folder), 2)
        with process_world(rank, 2, torch.device("cpu"), store=store):
            work(rank)

    ranks = [Process(target=child, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


@pytest.mark.parametrize("dying", chosen([0, 1], [1]))
def test_rank_killed_during_save_leaves_whole_checkpoints(dying: int, tmp_path: Path):
    config = CheckpointConfig(keep_last=1)
    run = make_run(TINY, parallel=ParallelConfig(world_size=2, dp=2), checkpoint=config)

    def save_twice(deadline: int, folder: Path, moment: Path, rank: int) -> None:
        saver = Saver(engine_of(run, rank), lambda: None)
        saver.save(folder, Progress(1, 1, 1), {"sequences": 0})
        saver.wait()
        if rank == dying:
            Reaper(deadline, moment).watch()
        saver.save(folder, Progress(2, 2, 2), {"sequences": 0})
        saver.wait()

    seen = []
    for deadline in range(100):
        folder, moment = tmp_path / str(deadline) / CHECKPOINTS, tmp_path / f"{deadline}.moment"
        statuses = two_ranks(
            partial(save_twice, deadline, folder, moment), tmp_path / f"{deadline}.store"
        )
        if statuses == [0, 0]:
            break
        assert statuses[dying] == DEAD and statuses[1 - dying] in (0, 1), "hangs"
        newest = newest_checkpoint(folder.parent)
        step = verify_checkpoint(newest)["step"]
        seen.append((moment.read_text(), step))
        if statuses[1 - dying] == 0:
            assert step == 2, "the survivor took for saved what was not"
    steps = [step for _, step in seen]
    assert steps == sorted(steps), "committed at one moment, and at all after it"
    assert len(seen) > (15 if dying == 0 else 4) and 1 in steps


def test_an_interrupted_rank_does_not_wait_for_its_writer(tmp_path: Path):
    """Ctrl-C while rank 0's writer waits for that of rank 1, which waits for its disk."""
    run = make_run(TINY, parallel=ParallelConfig(world_size=2, dp=2), checkpoint=CheckpointConfig())

    def work(rank: int) -> None:
        write, held = checkpoint_save.write_synced, threading.Event()

        def write_when_told(path: Path, content: Callable[..., object]) -> dict[str, Any]:
            if rank == 1:
                held.wait(600)
            return write(path, content)

        checkpoint_save.write_synced = write_when_told
        saver = Saver(engine_of(run, rank), lambda: None)
        saver.save(tmp_path / CHECKPOINTS, Progress(1, 1, 1), {"sequences": 0})
        if rank == 0:
            held.wait(0.2)  # its own file is written by then, most likely
        raise KeyboardInterrupt

    since = time.monotonic()
    assert two_ranks(work, tmp_path / "store") == [1, 1]
    assert time.monotonic() - since < 300 and newest_checkpoint(tmp_path) is None
