"""Run folders that somebody else has touched: what is found, what is refused, and that nothing
foreign is removed.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.run_report.facts import run_facts
from app.config import CheckpointConfig
from app.engine.checkpoint import save as checkpoint_save
from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.saver import Saver
from app.engine.files.checkpoints import (
    CHECKPOINTS,
    LATEST,
    MANIFEST,
    complete_checkpoints,
    named_by_latest,
    newest_checkpoint,
)
from app.engine.files.run_folder import (
    CONFIG,
    METRICS,
    PLAN,
    FolderLock,
    begin_metrics,
    check_place,
    create_run_folder,
    describe_run,
    read_metrics,
)
from app.engine.report.sinks import Console, JsonLines
from app.engine.start.start import Start, claim_start, find_start, preflight
from app.engine.step.records import ValidationReport
from app.errors import ConfigError
from app.planner.plan import Plan
from app.version import Version
from tests.cases import chosen
from tests.checkpoints import verify_checkpoint
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.processes.resume import FILE, RUN, saved
from tests.runs import TINY, engine_of, make_run
from tests.training import composed, corpus_in, train_rank

AUTO = replace(RUN, resume="auto")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# What `latest` may be.


def link_elsewhere(pointer: Path) -> None:
    (pointer.parents[2] / "b").mkdir()
    pointer.symlink_to("../../b")


LOST: dict[str, Callable[[Path], object]] = {
    "is missing": lambda pointer: None,
    "is empty": lambda pointer: pointer.write_text(""),
    "is not a file": lambda pointer: pointer.mkdir(),
    "is not text": lambda pointer: pointer.write_bytes(b"step-\xff\xfe"),
    "names step-00000099, which is not there": lambda pointer: pointer.write_text("step-00000099"),
    "names '../../b/checkpoints/step-00000003', w": lambda pointer: pointer.write_text(
        "../../b/checkpoints/step-00000003"
    ),
    "names '.', which is not the name of a checkpoint": lambda pointer: pointer.write_text("."),
    "is not a file ": link_elsewhere,
}


@pytest.mark.every(4)
@pytest.mark.parametrize("fault", LOST)
def test_without_a_pointer_the_newest_whole_one_is_taken(tmp_path: Path, fault: str):
    folder = tmp_path / "a"
    whole, _ = saved(folder, step=4), saved(folder, step=8)
    (folder / CHECKPOINTS / "step-00000008" / FILE).unlink()
    (folder / CHECKPOINTS / LATEST).unlink()
    LOST[fault](folder / CHECKPOINTS / LATEST)
    start = find_start(replace(AUTO, run_dir=str(folder)))
    assert (start.checkpoint, start.run_dir) == (whole, folder)
    assert find_start(replace(RUN, resume=str(folder))).checkpoint == whole
    with pytest.raises(LookupError, match=fault.strip()):
        named_by_latest(folder / CHECKPOINTS)


def test_without_a_pointer_and_a_whole_one_a_run_is_refused(tmp_path: Path):
    broken = saved(tmp_path / "a", step=8)
    (broken / MANIFEST).unlink()
    (broken.parent / LATEST).unlink()
    with pytest.raises(ConfigError, match=r"step-00000008: manifest.json cannot be read"):
        find_start(replace(AUTO, run_dir=str(tmp_path / "a")))


def test_only_folders_called_as_checkpoints_are_some(tmp_path: Path):
    folder = tmp_path / "a" / CHECKPOINTS
    one = saved(tmp_path / "a", step=4)
    for name in ("step-00000008.bak", "step-x", "step-9", "step-00000012x"):
        shutil.copytree(one, folder / name)
    (folder / "step-00000016").touch()
    (folder / "step-00000020").symlink_to(shutil.copytree(one, tmp_path / "elsewhere"))
    assert complete_checkpoints(folder) == [one]
    (folder / LATEST).unlink()
    linked = folder / "step-00000020"
    assert newest_checkpoint(tmp_path / "a") == linked, "one that was moved and linked can be read"
    huge = saved(tmp_path / "a", step=100_000_000)
    assert complete_checkpoints(folder) == [one, huge], "by number"


@pytest.mark.parametrize("left", [CONFIG, METRICS, f"{CHECKPOINTS}/step-x"])
def test_what_a_run_has_left_is_not_overwritten(tmp_path: Path, left: str):
    folder = tmp_path / "a"
    (folder / CHECKPOINTS).mkdir(parents=True)
    assert find_start(replace(RUN, run_dir=str(folder))) == Start(folder)
    (folder / left).write_text("x")
    with pytest.raises(ConfigError, match="holds another run; continue it with resume=auto"):
        find_start(replace(RUN, run_dir=str(folder)))
    assert find_start(replace(AUTO, run_dir=str(folder))) == Start(folder)


# Saving among strangers.


STRAYS: dict[str, Callable[[Path, Path], object]] = {
    ".step-note": lambda path, outside: path.write_text("mine"),
    ".step-link": lambda path, outside: path.symlink_to(outside),
    ".step-00000001.old": lambda path, outside: path.symlink_to(outside),
    ".step-00000003.tmp": lambda path, outside: path.symlink_to(outside),
    ".step-00000002.old": lambda path, outside: path.write_text("mine"),
    ".latest.tmp": lambda path, outside: path.mkdir(),
    "latest": lambda path, outside: path.mkdir(),
    "step-00000003": lambda path, outside: path.symlink_to(outside),
    "step-00000002": lambda path, outside: path.write_text("mine"),
    "step-00000000": lambda path, outside: path.symlink_to(outside),
    "step-00000001.bak": lambda path, outside: path.mkdir(),
    "step-00000099": lambda path, outside: path.symlink_to("nowhere"),
}
OUTSIDE = "outside"


def save_among_strays(rank: int, folder: Path) -> None:
    run = make_run(TINY, checkpoint=CheckpointConfig(keep_last=1, asynchronous=False))
    saver = Saver(engine_of(run), lambda: None)
    for step in (1, 2, 3, 4):
        saver.save(folder, Progress(step, step, step), {"sequences": 0})


@pytest.mark.every(4)
@pytest.mark.parametrize("name", STRAYS)
def test_strays_do_not_hinder_saving(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str):
    folder, outside = tmp_path / "run" / CHECKPOINTS, tmp_path / OUTSIDE
    folder.mkdir(parents=True)
    outside.mkdir()
    (outside / "precious").write_text("mine")
    STRAYS[name](folder / name, outside)
    kept = (os.readlink(folder / name) if (folder / name).is_symlink() else None, folder / name)
    run_distributed(save_among_strays, 1, folder)
    assert verify_checkpoint(newest_checkpoint(folder.parent))["step"] == 4
    assert complete_checkpoints(folder) == [folder / "step-00000004"]
    assert (outside / "precious").read_text() == "mine"
    (stray,) = names(folder) - {LATEST, "step-00000004"}
    assert stray in (name, f"{name}.stray")
    assert kept[0] is None or os.readlink(folder / stray) == kept[0]
    told = [line for line in capfd.readouterr().err.splitlines() if stray in line]
    assert told == [f"train.py: {folder}: not written by a run, and left as it is: {stray}"] or (
        name.startswith(".step-0000000") and len(told) == 1
    )


def save_failing(rank: int, folder: Path, number: int) -> str:
    run = make_run(TINY, checkpoint=CheckpointConfig(asynchronous=False))
    saver = Saver(engine_of(run), lambda: None)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    checkpoint_save.write_synced = fail
    with pytest.raises(ConfigError) as refused:
        saver.save(folder, Progress(1, 1, 1), {"sequences": 0})
    return str(refused.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EIO])
def test_more_room_is_advised_where_there_is_none(tmp_path: Path, number: int):
    (said,) = run_distributed(save_failing, 1, tmp_path / CHECKPOINTS, number)
    assert os.strerror(number) in said
    assert ("make room" in said) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_unremovable_checkpoint_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    def work(rank: int) -> None:
        checkpoint_save.shutil.rmtree = refuse
        save_among_strays(rank, tmp_path / CHECKPOINTS)

    run_distributed(work, 1)
    assert newest_checkpoint(tmp_path).name == "step-00000004"
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 3 and all("cannot be removed: [Errno 1]" in line for line in told)


# Places where no run can write.


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    places = {
        tmp_path / "file/run": "Not a directory",
        tmp_path / "file": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
        Path("/proc/run"): "",
    }
    for place, said in places.items():
        for resume in (None, "auto"):
            run = replace(RUN, run_dir=str(place), resume=resume)
            with pytest.raises(ConfigError, match=f"cannot be used: {said}") as refused:
                create_run_folder(run, find_start(run).run_dir)
            assert refused.value.key == "run_dir" and "more room" not in str(refused.value)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHECKPOINTS).touch()
    with pytest.raises(ConfigError, match=r"Not a directory.*run/checkpoints"):
        create_run_folder(RUN, tmp_path / "run")
    check_place(tmp_path / "new/run")
    real = os.statvfs(tmp_path)
    frozen = os.statvfs_result((*real[:8], real.f_flag | os.ST_RDONLY, *real[9:]))
    monkeypatch.setattr(os, "statvfs", lambda path: frozen)
    with pytest.raises(ConfigError, match="Read-only file system"):
        find_start(replace(RUN, run_dir=str(tmp_path / "new/run")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="run_dir=runs: cannot be used: Read-only file system"):
        find_start(RUN)


@pytest.mark.parametrize("name", [CONFIG, PLAN, METRICS, ".plan.json.tmp.json"])
def test_a_folder_in_the_place_of_a_file(tmp_path: Path, name: str):
    (tmp_path / name).mkdir()
    with FolderLock() as lock, pytest.raises(ConfigError, match=f"Is a directory.*{name}"):
        lock.take(tmp_path)
        describe_run(Plan(RUN), tmp_path, Version("0.1.0", None, None))
        begin_metrics(tmp_path, 3)


def test_a_file_that_may_not_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / METRICS).write_text('{"step": 1}\n')

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(ConfigError, match="cannot be used: Operation not permitted"):
        begin_metrics(tmp_path, 1)


def test_a_busy_folder_is_refused_before_anything_is_loaded(tmp_path: Path):
    """By the process that would start the ranks, and by a rank."""
    saved(tmp_path / "a")
    run = replace(AUTO, run_dir=str(tmp_path / "a"))
    with FolderLock() as ours, FolderLock() as theirs:
        assert claim_start(run, None, ours).checkpoint
        with pytest.raises(ConfigError, match="another run is writing there"):
            claim_start(run, None, theirs)
        with pytest.raises(ConfigError, match="another run is writing there"):
            preflight(run, None)
        alive, started = os.pipe()
        child = os.fork()
        if not child:
            os.write(started, b"!")
            time.sleep(60)
            os._exit(0)
        assert os.read(alive, 1) == b"!"
    with FolderLock() as later:
        later.claim(tmp_path / "a")
        later.take(tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
        with pytest.raises(ConfigError, match="was removed or replaced"):
            later.check()
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "a child of the first does not hold it"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


# metrics.jsonl


def rows_of(*steps: int) -> list[dict[str, Any]]:
    return [{"step": step, "loss": 1.5, "tokens_per_s": 2.5} for step in steps]


def text_of(rows: list[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


ODD_LINES = {
    '{"step": 3, "lo': "no JSON",
    "\x00": "no JSON",
    "[" * 100_000: "no JSON",
    "5": "no object",
    '"step"': "no object",
    '{"loss": 1, "tokens_per_s": 1}': "step is no whole number",
    '{"step": "7", "loss": 1}': "step is no number",
    '{"step": 1e400}': "step is no whole number",
    '{"step": true}': "step is no number",
    '{"step": -1}': "step is no whole number",
    '{"step": 3, "loss": 3.0}': "tokens_per_s is missing",
    '{"step": 3, "val_loss": null}': "val_loss is no number",
    '{"step": 3, "loss": "low"}': "loss is no number",
    '{"step": 3, "loss": [1]}': "loss is no number",
    f'{{"step": 3, "val_loss": 1{"0" * 400}}}': "val_loss is no number",
    '{"step": 3, "val_loss": null, "not_finite": {"val_loss": "much"}}': "val_loss is no number",
    '{"step": 3, "val_loss": null, "not_finite": 5}': "val_loss is no number",
}


@pytest.mark.parametrize(("broken", "why"), ODD_LINES.items(), ids=range(len(ODD_LINES)))
def test_metric_lines_after_broken_one_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], broken: str, why: str
):
    path = tmp_path / METRICS
    path.write_text(text_of(rows_of(1, 2)) + f"{broken}\n" + text_of(rows_of(4, 5)) + '{"step')
    assert read_metrics(tmp_path) == rows_of(1, 2, 4, 5)
    begin_metrics(tmp_path, 4)
    assert path.read_text() == text_of(rows_of(1, 2, 4))
    assert capfd.readouterr().err == (
        f"train.py: {path}: 1 line left out, the first is line 3 ({why})\n"
    ), "and not the last one, as a killed process leaves it"
    path.write_bytes(
        text_of(rows_of(1)).encode() + b'{"step": "\xff"}\n' + text_of(rows_of(2)).encode()
    )
    assert read_metrics(tmp_path) == rows_of(1, 2)


def test_odd_last_line_with_newline_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    path = tmp_path / METRICS
    path.write_text("{}\n" + text_of(rows_of(1)) + '{"step": 1e400}\n')
    begin_metrics(tmp_path, 4)
    assert path.read_text() == text_of(rows_of(1))
    said = "2 lines left out, the first is line 1 (step is no whole number)"
    assert capfd.readouterr().err == f"train.py: {path}: {said}\n"


def test_row_without_a_loss_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """A report of something else: tables and plots pass over it."""
    path = tmp_path / METRICS
    path.write_text(text_of([*rows_of(1), {"step": 2}]))
    begin_metrics(tmp_path, 4)
    assert read_metrics(tmp_path) == [*rows_of(1), {"step": 2}]
    facts = run_facts(tmp_path)
    assert (facts.step, facts.loss, facts.curve) == (1, 1.5, ((1, 1.5),))
    assert capfd.readouterr().err == ""


NOT_FINITE = {"loss": math.nan, "grad_norm": math.inf, "val_loss": -math.inf}


def test_not_finite_numbers_are_strict_json_and_read_back(tmp_path: Path):
    (tmp_path / METRICS).touch()
    sink = JsonLines(tmp_path, lambda: pytest.fail("is there"))
    sink._write({"step": 1, **NOT_FINITE, "tokens_per_s": 1.5})
    sink.close()

    def refuse(word: str) -> None:
        pytest.fail(f"{word} is no JSON")

    for _ in range(2):  # as written, and as a run that continues writes it again
        row = json.loads((tmp_path / METRICS).read_text(), parse_constant=refuse)
        assert row == {
            "step": 1,
            "loss": None,
            "grad_norm": None,
            "val_loss": None,
            "tokens_per_s": 1.5,
            "not_finite": {"loss": "NaN", "grad_norm": "Infinity", "val_loss": "-Infinity"},
        }
        (found,) = read_metrics(tmp_path)
        assert math.isnan(found.pop("loss"))
        assert found == {
            "step": 1,
            "grad_norm": math.inf,
            "val_loss": -math.inf,
            "tokens_per_s": 1.5,
        }
        begin_metrics(tmp_path, 1)


def test_not_finite_numbers_of_earlier_versions_are_read(tmp_path: Path):
    (tmp_path / METRICS).write_text(
        '{"step": 1, "loss": NaN, "grad_norm": Infinity, "tokens_per_s": 1.5}\n'
    )
    (found,) = read_metrics(tmp_path)
    assert math.isnan(found["loss"]) and found["grad_norm"] == math.inf


def test_metrics_of_a_run_without_checkpoints_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    for n in (1, 2):
        (tmp_path / METRICS).write_text(text_of(rows_of(0, n)))
        begin_metrics(tmp_path, 0)
        assert (tmp_path / METRICS).read_text() == ""
        assert (tmp_path / f"metrics-{n}.jsonl").read_text() == text_of(rows_of(0, n))
        assert f"metrics that were there are in metrics-{n}.jsonl" in capfd.readouterr().err
    (tmp_path / METRICS).write_text(text_of(rows_of(0)))
    begin_metrics(tmp_path, 0)
    assert names(tmp_path) == {METRICS, "metrics-1.jsonl", "metrics-2.jsonl"}


def test_a_full_disk_loses_no_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """The file's handle leads to /dev/full for a while, and takes half a line at first."""
    (tmp_path / METRICS).touch()
    sink = JsonLines(tmp_path, lambda: pytest.fail("is there"))
    write, room = os.write, 20

    def write_while_there_is_room(handle: int, data: bytes) -> int:
        nonlocal room
        if handle == sink._file and not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(handle, data[:room] if handle == sink._file else data)
        room -= done if handle == sink._file else 0
        return done

    with Patches.context() as patch:
        patch.setattr(os, "write", write_while_there_is_room)
        for step in (1, 2, 3):
            sink.validation(ValidationReport(step, 1.0, 1))
        with pytest.raises(ConfigError, match=f"3 lines of {METRICS} could not be .*: No space"):
            sink.check()
    said = capfd.readouterr().err
    assert said.count("No space left on device; training continues") == 1 and said.count("\n") == 1
    sink.validation(ValidationReport(4, 1.0, 1))
    sink.close()
    sink.check()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def train_until_removed(rank: int, run: Any, remove: Callable[[Path], None]) -> str:
    """A run from whose folder something is removed after its third step."""
    print_step = Console.step

    def step(console: Console, report: Any) -> None:
        print_step(console, report)
        if report.step == 3:
            remove(Path(run.run_dir))

    Console.step = step
    with pytest.raises(ConfigError) as ended:
        train_rank(rank, run, {})
    return str(ended.value)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return corpus_in(tmp_path_factory.mktemp("corpus"))


REMOVED = [
    (*case, dp)
    for case in itertools.product(("folder", "metrics", "replaced"), (2, 0))
    for dp in (1, 2)
]
QUICK = [("folder", 2, 1), ("metrics", 2, 2), ("metrics", 0, 1), ("replaced", 0, 1)]


@pytest.mark.every(4)
@pytest.mark.parametrize(("what", "interval", "dp"), chosen(REMOVED, QUICK))
def test_run_reports_removed_files(
    corpus: tuple[str, ...], tmp_path: Path, what: str, interval: int, dp: int
):
    """By rank 0; a ConfigError is raised on all ranks, which hang or die otherwise."""
    folder = tmp_path / "run"
    settings = ("train.steps=20", f"checkpoint.interval={interval}", "log.console=true")
    run = composed((*corpus, *settings, f"run_dir={folder}", f"parallel.dp={dp}"), dp)

    def remove(run_dir: Path) -> None:
        if what == "metrics":
            (run_dir / METRICS).unlink()
        else:  # at once, since other ranks and the writer of checkpoints are at work in it
            run_dir.rename(tmp_path / "removed")
        if what == "replaced":
            run_dir.mkdir()

    said, *others = run_distributed(train_until_removed, dp, run, remove)
    assert others == [said] * (dp - 1)
    if what == "metrics":
        assert said == (
            f"run_dir={folder}: metrics.jsonl was removed or replaced while this run was writing it"
        )
        newest = newest_checkpoint(folder)
        assert (newest and newest.name) == ("step-00000005" if interval else None)
    else:
        rule = "was removed or replaced while this run was writing there"
        assert said == f"run_dir={folder}: {rule}"
        assert not folder.exists() or names(folder) == set(), "another run's is left alone"
