"""Drawn faults of files and disks: broken checkpoints are refused, and full disks lose nothing.

A case that fails prints what was drawn.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.config import Run
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.load import Progress, load_checkpoint
from app.engine.files.checkpoints import CHECKPOINTS, complete_checkpoints, newest_checkpoint
from app.engine.ranks.groups import process_world
from app.engine.start.start import find_start
from app.errors import ConfigError
from tests.checkpoints import verify_checkpoint
from tests.distributed import run_distributed
from tests.forks import Process
from tests.processes.checkpoint import MODELS, run_of, save
from tests.runs import engine_of
from tests.training import composed, corpus_in, train_rank, untimed

FILES = ("manifest.json", "rank-00000.safetensors", "rank-00001.safetensors")
OLDER, NEWER = "step-00000001", "step-00000002"


# Broken checkpoints.


@dataclass(frozen=True)
class Damage:
    """Damage to a checkpoint."""

    words: str
    do: Callable[[Path], object]  # to the checkpoint's folder
    files: tuple[str, ...]  # one of these is to be named


def draw_damage(draw: random.Random) -> Damage:
    """Something that happens to one file, or to two that change places."""
    name = draw.choice(FILES)
    kinds = {
        "cut": draw_cut,
        "turned bits": draw_turned_bits,
        "overwritten block": draw_overwritten,
        "removed": lambda draw: Path.unlink,
        "empty": lambda draw: lambda path: path.write_bytes(b""),
        "longer": draw_longer,
        "a folder": lambda draw: to_folder,
    }
    kind = draw.choice((*kinds, "swapped", "from the older one"))
    if kind == "swapped":
        other = draw.choice([file for file in FILES if file != name])
        words, files = f"{name} and {other} {kind}", (name, other)
        return Damage(words, lambda step: swap(step, *files), files)
    if kind == "from the older one":
        # The older manifest is whole itself: it does not fit the files.
        named = FILES[1:] if name == FILES[0] else (name,)
        older = Path("..", OLDER, name)
        return Damage(f"{name} {kind}", lambda step: shutil.copy(step / older, step / name), named)
    damage = kinds[kind](draw)
    return Damage(f"{name}: {kind}", lambda step: damage(step / name), (name,))


def draw_cut(draw: random.Random) -> Callable[[Path], object]:
    part = draw.random()
    return lambda path: os.truncate(path, int(part * path.stat().st_size))


def draw_turned_bits(draw: random.Random) -> Callable[[Path], object]:
    places = [(draw.random(), draw.randrange(8)) for _ in range(draw.choice((1, 1, 2, 20)))]

    def turn(path: Path) -> None:
        content = bytearray(path.read_bytes())
        for place, bit in places:
            content[int(place * len(content))] ^= 1 << bit
        path.write_bytes(content)

    return turn


def draw_overwritten(draw: random.Random) -> Callable[[Path], object]:
    place, block = draw.random(), draw.choice((bytes(64), b"\xff" * 64, draw.randbytes(64)))

    def overwrite(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(int(place * (path.stat().st_size - len(block))))
            file.write(block)

    return overwrite


def draw_longer(draw: random.Random) -> Callable[[Path], object]:
    more = draw.randbytes(draw.choice((1, 100)))
    return lambda path: path.write_bytes(path.read_bytes() + more)


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swap(step: Path, name: str, other: str) -> None:
    (step / name).rename(step / "aside")
    (step / other).rename(step / name)
    (step / "aside").rename(step / other)


def save_two(rank: int, folder: Path) -> None:
    """Steps 1 and 2 of two ranks, with other contents."""
    run = run_of(MODELS["bias"], 2, 2)
    engine = engine_of(run, rank)
    time.time = lambda: 0.0  # which the manifest holds: the same bytes every time
    for step in (1, 2):
        for piece in engine.optimizer.param_shards():
            piece.main.fill_(step)
        save(folder, run, engine, progress=Progress(step, step, step))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder."""
    folder = tmp_path_factory.mktemp("two")
    run_distributed(save_two, 2, folder / CHECKPOINTS)
    return folder


def refusals(rank: int, whole: Path, seed: int) -> list[tuple[str, bool, str | None]]:
    """(damage, whether it was refused rightly, what was said) of ten drawn damages."""
    draw, run = random.Random(seed), run_of(MODELS["bias"])
    engine, found = engine_of(run, rank), []
    for nth in range(10):
        damage = draw_damage(draw)
        folder = shutil.copytree(whole, whole.with_name(f"{whole.name}-{seed}-{nth}"))
        step = folder / CHECKPOINTS / NEWER
        damage.do(step)
        by_folder, by_name = {"resume": "auto", "run_dir": str(folder)}, {"resume": str(step)}
        try:
            start = find_start(replace(run, **draw.choice((by_folder, by_name))))
            load_checkpoint(start.checkpoint, start.manifest, engine)
            found.append((damage.words, False, None))
        except ConfigError as error:
            named = any(f": {name} " in str(error) for name in damage.files)
            older = f"; did you mean {step.with_name(OLDER)}?"
            right = named and str(error).endswith(older) and "\n" not in str(error)
            found.append((damage.words, right, str(error)))
    return found


@pytest.mark.every(8)
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_checkpoint_is_refused_by_name(seed: int, two_steps: Path):
    """In one line that names the file and offers the older checkpoint."""
    (found,) = run_distributed(refusals, 1, two_steps, seed)
    assert [case for case in found if not case[1]] == []
    assert len(found) == 10


# Full disks.

STEPS = 12
MS_REC, MS_PRIVATE, MS_REMOUNT = 0x4000, 0x40000, 32
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
Limit = Callable[[Path, int], Callable[[], object]]  # (folder, bytes) -> lifts it


def mount(folder: Path, size: int) -> Callable[[], object]:
    """Have a folder lie on a disk of its own that this process alone sees, and that can grow.

    Raises OSError where this process may not do that.
    """
    libc, ids = ctypes.CDLL(None, use_errno=True), (os.geteuid(), os.getegid())

    def call(code: int) -> None:
        if code:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    call(libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if ids[0] else 0)))
    if ids[0]:
        Path("/proc/self/setgroups").write_text("deny")
        for kind, number in zip(("uid", "gid"), ids, strict=True):
            Path(f"/proc/self/{kind}_map").write_text(f"0 {number} 1")
    call(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    folder.mkdir()
    call(libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=%d" % size))
    return lambda: call(libc.mount(b"none", bytes(folder), b"tmpfs", MS_REMOUNT, b"size=64m"))


def count(folder: Path, size: int) -> Callable[[], object]:
    """Have files below a folder take so many bytes in all; what is removed gives no room back."""
    room, opened, written = size, io.open, os.write

    def take(data: bytes | memoryview) -> bytes | memoryview:
        nonlocal room
        if data and not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fits = data[: min(room, len(data))]
        room -= len(fits)
        return fits

    class Counted(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(take(memoryview(data).cast("B")))

    def open_counted(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        place = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if not place.startswith(str(folder)) or mode[0] not in "wa":
            return opened(file, mode, *args, **options)
        binary = io.BufferedWriter(Counted(file, mode[0]))
        return binary if "b" in mode else io.TextIOWrapper(binary)

    def write_counted(handle: int, data: bytes) -> int:
        below = os.readlink(f"/proc/self/fd/{handle}").startswith(str(folder))
        return written(handle, take(data) if below else data)

    def lift() -> None:
        nonlocal room
        room = 2**40

    io.open, os.write = open_counted, write_counted
    return lift


def mount_or_count(folder: Path, size: int) -> Callable[[], object]:
    """A disk where this process may mount one; containers often forbid it."""
    try:
        return mount(folder, size)
    except PermissionError:
        print("may not mount a disk: bytes are counted instead")
        return count(folder, size)


def fill_and_resume(run: Run, limit: Limit, size: int, found: Path) -> None:
    """Train on a disk that is too small, and once more when it has grown.

    Leaves what was seen in `found`.
    """
    folder, committed, commit = Path(run.run_dir or ""), [], checkpoint_save._commit

    def commit_and_tell(temporary: Path, final: Path) -> None:
        commit(temporary, final)
        committed.append(final.name)

    checkpoint_save._commit = commit_and_tell
    lift = limit(folder, size)
    with process_world(0, 1, torch.device("cpu")):
        with pytest.raises(ConfigError) as ended:
            train_rank(0, run, {})
        there = complete_checkpoints(folder / CHECKPOINTS)
        lift()
        facts = {
            "said": str(ended.value),
            "committed": committed[:],
            "whole": [verify_checkpoint(path)["step"] for path in there],
            "newest": (path := newest_checkpoint(folder)) and path.name,
        }
        train_rank(0, replace(run, resume="auto"), {})
        sums = verify_checkpoint(newest_checkpoint(folder))["files"]
    found.write_text(json.dumps({**facts, "sums": sums, "rows": rows_of(folder)}))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return sorted(untimed(folder), key=lambda row: (row["step"], "val_loss" in row))


def behind(step: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["step"] > step]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    settings = (f"train.steps={STEPS}", "checkpoint.interval=2", "train.eval_interval=3")
    return (*corpus_in(tmp_path_factory.mktemp("corpus")), *settings)


@pytest.fixture(scope="module")
def with_room(corpus: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run on a disk that is large enough."""
    folder = tmp_path_factory.mktemp("with_room") / "run"
    run_distributed(train_rank, 1, composed((*corpus, f"run_dir={folder}"), 1), {})
    return folder


DISKS = [(kind, seed) for kind in ("counted", "mounted") for seed in range(8)]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "seed"), DISKS)
def test_a_full_disk_loses_nothing_that_was_committed(
    kind: str, seed: int, corpus: tuple[str, ...], with_room: Path, tmp_path: Path
):
    """Full at a drawn byte of a checkpoint, metrics.jsonl or config.yaml.

    With more room the run resumes, and ends as one that had it from the beginning.
    """
    draw = random.Random(seed)
    most = 3 if kind == "mounted" else STEPS // 2  # checkpoints at a time, and in all
    one = sum(path.stat().st_size for path in newest_checkpoint(with_room).iterdir())
    size = int(draw.choice((0.01, 1, 1, 1)) * draw.random() * most * one)
    beside = draw.choice(("true", "false"))
    print(f"{size} bytes, checkpoint.asynchronous={beside}")
    run = composed((*corpus, f"run_dir={tmp_path}/run", f"checkpoint.asynchronous={beside}"), 1)
    limit = {"counted": count, "mounted": mount_or_count}[kind]
    child = Process(target=fill_and_resume, args=(run, limit, size, tmp_path / "found"))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    found, expected = json.loads((tmp_path / "found").read_text()), rows_of(with_room)
    print(found["said"], found["committed"], found["whole"])
    assert "No space left on device" in found["said"] and "\n" not in found["said"]
    assert found["said"].count("make room there") == 1
    committed = found["committed"]
    assert [f"step-{step:08d}" for step in found["whole"]][-2:] == committed[-2:]
    assert found["newest"] == (committed[-1] if committed else None)
    at = max(found["whole"], default=-1)  # lines up to there that found no room may be missing
    assert all(row in expected for row in found["rows"])
    assert behind(at, found["rows"]) == behind(at, expected)
    assert found["sums"] == verify_checkpoint(newest_checkpoint(with_room))["files"]
