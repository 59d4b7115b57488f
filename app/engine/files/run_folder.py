"""Create, lock and read the folder of a run.

runs/<time>-<model>/  config.yaml  plan.json  metrics.jsonl  loss.png  ended.json  wandb/
                      checkpoints/{latest, step-00000100/, …}  tokenizer.json  tokenizer_config.json
                      pretrained/
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import time
import types
import typing
from contextlib import suppress
from enum import Enum
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, overload

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from app.config import Run
from app.engine.files.checked import DEEPEST, unreadable
from app.engine.files.checkpoints import CHECKPOINTS, newest_checkpoint
from app.engine.files.metric_lines import BadLineError, line_of, row_of
from app.engine.files.signals import ctrl_c_held_back
from app.errors import ConfigError, warn, writing
from app.own_files import make_own, open_own, open_regular, read_regular, write_whole
from app.plan.formatting import count_of
from app.planner.explain import Facts
from app.planner.export import plan_json
from app.planner.plan import Plan
from app.version import VERSION, Version

RUNS = Path("runs")
CONFIG = "config.yaml"
HEADER = "# Graphfold "  # start of the first line of config.yaml, before the version
PLAN = "plan.json"
TAKEN = "taken"  # its section of facts of this host
METRICS = "metrics.jsonl"
ENDED = "ended.json"


def choose_folder(run: Run, checkpoint: Path | None, ours: bool = False) -> Path | None:
    """Return the folder of a run that starts from `checkpoint` (None: anew); None for a new one.

    A run resumes in the folder of its checkpoint if that is the newest there. From an older
    checkpoint it branches into a new folder, so that later results stay. `ours`: run.run_dir
    belongs to an earlier attempt at this run. Writes nothing. Raises ConfigError.
    """
    saved_in = None  # run folder of the checkpoint
    if checkpoint is not None and checkpoint.parent.name == CHECKPOINTS:
        saved_in = checkpoint.parent.parent
    resumes = saved_in is not None and newest_checkpoint(saved_in) == checkpoint
    if not run.run_dir:
        return saved_in if resumes else None
    wanted = Path(run.run_dir)
    in_place = resumes and saved_in is not None and wanted.resolve() == saved_in.resolve()
    if holds_run(wanted) and not (ours or run.resume == "auto" or in_place):
        advice = "continue it with resume=auto, or choose another run_dir"
        raise ConfigError("run_dir", wanted, "holds another run", advice=advice)
    return wanted


def holds_run(folder: Path) -> bool:
    """True if a run has written to the folder."""
    config = folder / CONFIG
    # A process killed between locking the folder and writing config.yaml leaves it empty.
    empty = config.is_file() and not config.stat().st_size
    described = os.path.lexists(folder / METRICS) or (os.path.lexists(config) and not empty)
    return described or any((folder / CHECKPOINTS).glob("*"))


def check_place(folder: Path) -> None:
    """Raise ConfigError if a run folder could not be created or written. Writes nothing."""
    with writing(folder):
        place = folder
        while not _exists(place):
            place = place.parent
        if not place.is_dir():
            raise _refused(errno.ENOTDIR, place)
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            raise _refused(errno.EROFS, place)
        if not os.access(place, os.W_OK | os.X_OK):
            raise _refused(errno.EACCES, place)


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _refused(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def create_run_folder(run: Run, chosen: Path | None) -> Path:
    """Create the run folder; for None a new one with an unused name. Raises ConfigError."""
    folder = chosen or RUNS / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{run.model.name}"
    with writing(folder):
        if chosen is None:
            return _new_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints = folder / CHECKPOINTS
        if os.path.lexists(checkpoints) and not checkpoints.is_dir():
            raise _refused(errno.ENOTDIR, checkpoints)
    return folder


class FolderLock:
    """Lock of a run folder for one process, from `claim` or `take` to the end of the block."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._folder = Path()
        self._identity: tuple[int, int] | None = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def claim(self, folder: Path | None) -> None:
        """Lock a folder that holds a run; no-op for others, which nothing else uses yet."""
        if folder is not None and os.path.lexists(folder / CONFIG):
            self.take(folder)

    def take(self, folder: Path) -> None:
        """Lock a folder. Raises ConfigError if another process has it."""
        if self._file is not None:
            return self.check()
        # A run may hold a file that `make_own` would replace: `cp -al` has given it a second name.
        with suppress(OSError), open_regular(folder / CONFIG) as held:
            self._lock(held, folder)
        with writing(folder):
            make_own(folder / CONFIG)
            self._file = os.fdopen(open_own(folder / CONFIG, append=True), "ab")
            self._folder = folder
            self._identity = identity(folder)
        # Forked workers that prepare data must not keep the lock after the run was killed.
        os.register_at_fork(after_in_child=self._close)
        self._lock(self._file, folder)

    def _lock(self, file: BinaryIO, folder: Path) -> None:
        # flock ends with the process, so a killed run leaves no stale lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._close()
            rule = "another run is writing there"
            advice = "choose another folder, or wait for it"
            raise ConfigError("run_dir", folder, rule, advice=advice) from error
        except OSError:
            pass  # a file system without locks

    def check(self) -> None:
        """Raise ConfigError if the locked folder was removed or replaced."""
        if self._identity != identity(self._folder):
            rule = "was removed or replaced while this run was writing there"
            raise ConfigError("run_dir", self._folder, rule)


def identity(path: Path | int) -> tuple[int, int] | None:
    """Return device and inode of a path or file descriptor, or None if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@ctrl_c_held_back()
def describe_run(plan: Plan, folder: Path, version: Version, facts: Facts | None = None) -> None:
    """Write config.yaml and plan.json, the program's version first, and in plan.json what the run
    really uses (`taken`). Raises ConfigError.
    """
    config = OmegaConf.to_yaml(OmegaConf.create(plain(dataclasses.asdict(plan.run))))
    planned = {VERSION: version.record(), **plan_json(plan)}
    if facts is not None:
        planned[TAKEN] = dataclasses.asdict(facts)
    with writing(folder):
        # The version is a comment, so that the file holds nothing but the configuration.
        # In place, because the run's lock is on the file.
        with os.fdopen(open_own(folder / CONFIG, append=False), "wb") as file:
            file.write(f"{HEADER}{version}\n{config}".encode())
        write_whole(folder / PLAN, json.dumps(planned) + "\n")


def read_config(path: Path) -> dict[str, Any]:
    """Return the settings of a run's config.yaml as plain values; empty for an empty file. Raises
    FileNotFoundError, and ConfigError for a file that holds something else.
    """
    try:
        content = read_regular(path)
        _check_yaml(content)
        values = OmegaConf.to_container(OmegaConf.load(BytesIO(content)))
        if not isinstance(values, dict):
            raise ValueError("is no list of settings")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise unreadable(path, error, "restore it, or remove it") from error
    return values  # type: ignore[return-value]


def _check_yaml(content: bytes) -> None:
    """Raise ValueError for YAML that a run does not write, and that may take forever to read:
    aliases, which a few lines multiply without end, and deep nesting.
    """
    depth = 0
    for event in yaml.parse(content, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"has an alias, *{event.anchor}")
        if depth > DEEPEST:
            raise ValueError(f"is nested deeper than {DEEPEST} levels")


def note_end(folder: Path, step: int) -> None:
    """Record that a run is complete. Raises ConfigError."""
    with writing(folder):
        write_whole(folder / ENDED, json.dumps({"step": step}) + "\n")


def forget_end(folder: Path) -> None:
    """Remove the record of completion as a run starts or resumes here. Raises ConfigError."""
    with writing(folder):
        (folder / ENDED).unlink(missing_ok=True)


def has_ended(folder: Path) -> bool:
    """Return whether the last run in this folder is complete."""
    return os.path.lexists(folder / ENDED)


def _new_folder(wanted: Path) -> Path:
    for name in (wanted, *(wanted.with_name(f"{wanted.name}-{n}") for n in range(2, 1000))):
        try:
            name.mkdir(parents=True)
        except FileExistsError:
            continue
        return name
    raise ConfigError(
        "run_dir", None, f"{wanted} and its successors exist", advice="choose another run_dir"
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the reports of a run, without invalid lines. Raises ConfigError."""
    return _metrics(run_dir)[0]


def _metrics(run_dir: Path) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """Return the reports of a run, and (number from 1, reason) of each invalid line.

    A last line without a newline is left by a killed process, and does not count.
    """
    rows: list[dict[str, Any]] = []
    odd: list[tuple[int, str]] = []
    with writing(run_dir):
        *lines, cut = _bytes_of(run_dir / METRICS).split(b"\n")
    for number, line in enumerate((*lines, cut), 1):
        try:
            rows.append(row_of(line))
        except BadLineError as error:
            odd += [(number, str(error))] if number <= len(lines) else []
    return rows, odd


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path)
    except FileNotFoundError:
        return b""


def begin_metrics(run_dir: Path, from_step: int) -> None:
    """Cut metrics.jsonl down to reports up to a step, none for step 0. Raises ConfigError.

    Invalid lines are dropped with a warning. A run that starts anew renames an existing file, also
    with a warning.
    """
    path, (rows, odd) = run_dir / METRICS, _metrics(run_dir)
    with writing(run_dir):
        if not from_step and any(row["step"] for row in rows):
            others = (path.with_stem(f"{path.stem}-{n}") for n in range(1, 1000))
            kept = next(other for other in others if not os.path.lexists(other))
            path.rename(kept)
            warn(f"{run_dir}: this run starts anew; the metrics that were there are in {kept.name}")
        elif odd:
            number, why = odd[0]
            first = f"{count_of(len(odd), 'line')} left out, the first is line {number}"
            warn(f"{path}: {first} ({why})")
        kept_rows = [row for row in rows if row["step"] <= from_step] if from_step else []
        write_whole(path, "".join(map(line_of, kept_rows)))


@overload
def plain(value: dict[str, Any]) -> dict[str, object]: ...
@overload
def plain(value: object) -> object: ...
def plain(value: object) -> object:
    """Return a value as dictionaries, lists, numbers and strings; enums as the user typed them."""
    match value:
        case Enum():
            return value.value
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case _:
            return value


def from_plain(kind: Any, value: Any) -> Any:
    """Rebuild a value of type `kind` from the output of `plain`.

    Keys that a section lacks get their defaults; unknown keys are ignored.
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        return None if value is None else from_plain(kind, value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], value[name]) for name in hints.keys() & value})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if not isinstance(value, list):
        return value
    each = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
    return tuple(value) if each is None else tuple(from_plain(each, item) for item in value)
