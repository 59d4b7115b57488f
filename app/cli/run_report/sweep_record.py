"""Record of a sweep, from which the same command resumes and a report is made.

sweeps/<name>/
    sweep.json              this record
    report.{txt,csv,html}   the report
    0_…/ 1_…/ …             the run folder of each job, with its output in job.log
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from app.cli.options.old_names import with_present_names
from app.config import LogConfig
from app.engine.files.checked import (
    LARGEST,
    FieldError,
    fields,
    list_of,
    nullable,
    number,
    one_of,
    parse_strictly,
    text,
    unreadable,
    whole,
)
from app.errors import ConfigError, no_room
from app.own_files import read_regular, write_whole

RECORD = "sweep.json"
JOB_LOG = "job.log"


class JobState(Enum):
    """State of a job."""

    waiting = "waiting"
    running = "running"
    done = "done"
    failed = "failed"
    skipped = "skipped"  # impossible, too big, or too many ranks for this host
    interrupted = "interrupted"
    # a run without a record in sweep.json that is running, or ended before its last step
    unfinished = "unfinished"


def _folder_name(field: str, value: Any) -> None:
    """Accept the name of a folder in the sweep's, which leads nowhere else."""
    text(field, value)
    if value in ("", ".", "..") or set(value) & {"/", "\0"}:
        raise FieldError(field, value, "the name of a folder")


_JOB = fields(
    {
        "number": whole(),
        "folder": _folder_name,
        "overrides": list_of(text),
        "swept": list_of(text),
        "state": one_of(*(state.value for state in JobState)),
    },
    reason=nullable(text),
    exit_code=nullable(whole(-LARGEST)),
    seconds=nullable(number(0)),
)
_SWEEP = fields({"folder": text, "command": text, "began": text, "jobs": list_of(_JOB)})


@dataclass(frozen=True, slots=True)
class Job:
    """One combination of a sweep."""

    number: int  # from 0, in the order of the combinations
    folder: str  # name of its run folder, in the sweep's folder
    overrides: tuple[str, ...]  # all of them
    swept: tuple[str, ...]  # those that differ between jobs
    state: JobState = JobState.waiting
    reason: str | None = None  # why it was skipped or failed
    # exit code of its process; negative for the signal that ended it; None if not known
    exit_code: int | None = None
    seconds: float | None = None  # wall time of its last start

    @property
    def label(self) -> str:
        """Return the overrides that distinguish it from other jobs, as text."""
        return " ".join(self.swept or self.overrides) or "defaults"

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Job:
        """Read a job as `Sweep.save` writes it."""
        lists = {name: with_present_names(values[name]) for name in ("overrides", "swept")}
        return cls(**values | lists | {"state": JobState(values["state"])})


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep and all its jobs."""

    folder: Path  # folder of the sweep
    command: str  # command that began it
    began: str  # local time when it began, ISO 8601
    jobs: tuple[Job, ...]

    @property
    def name(self) -> str:
        """Return the name of the sweep, also its group in Weights & Biases."""
        return self.folder.resolve().name

    def job_of(self, overrides: Sequence[str]) -> Job:
        """Return the job whose overrides these begin with. Raises StopIteration without one."""
        return next(
            job for job in self.jobs if tuple(overrides[: len(job.overrides)]) == job.overrides
        )

    def title(self, job: Job, of: int | None = None) -> str:
        """Return the beginning of a job's line: its number, of how many, and its label. `of` is
        given where jobs are recorded as they are chosen.
        """
        return f"[{job.number + 1}/{of or len(self.jobs)}] {job.label}"

    def changed(self, number: int, **changes: Any) -> Sweep:
        """Return the sweep with the fields of one job changed."""
        jobs = [
            dataclasses.replace(job, **changes) if job.number == number else job
            for job in self.jobs
        ]
        return dataclasses.replace(self, jobs=tuple(jobs))

    def save(self) -> None:
        """Write sweep.json atomically. Raises ConfigError."""
        values = dataclasses.asdict(self) | {"folder": self.name}
        for job in values["jobs"]:
            job["state"] = job["state"].value
        try:
            write_whole(self.folder / RECORD, json.dumps(values, indent=1) + "\n")
        except OSError as error:
            rule = f"{RECORD} cannot be written: {error.strerror}"
            raise ConfigError("hydra.sweep.dir", self.folder, rule) from error

    @classmethod
    def load(cls, folder: Path) -> Sweep | None:
        """Read the sweep of a folder; None if it has none. Raises ConfigError."""
        path = folder / RECORD
        try:
            values = parse_strictly(read_regular(path))
            _SWEEP("", values)
            for place, job in enumerate(values["jobs"]):
                one_of(place)(f"jobs[{place}].number", job["number"])
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise _unusable(folder, error) from error
        except (OSError, ValueError) as error:
            raise unreadable(path, error, "restore it, or choose a new folder") from error
        return cls(
            folder, values["command"], values["began"], tuple(map(Job.from_json, values["jobs"]))
        )


def left_to_sweep(log: LogConfig | DictConfig, sweep: str) -> dict[str, str]:
    """Return the log key that groups a run under its sweep in Weights & Biases, unless `log` sets
    it.
    """
    return {"group": sweep} if log.group is None else {}


def _unusable(folder: Path, error: OSError) -> ConfigError:
    rule = f"cannot be used: {error.strerror}"
    advice = "make room there" if no_room(error) else "choose another"
    return ConfigError("hydra.sweep.dir", folder, rule, advice=advice)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one sweep at a time. Raises ConfigError.

    Jobs inherit the lock, so it is held as long as a job runs, even if its sweep was killed.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _unusable(folder, error) from error
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            "hydra.sweep.dir",
            folder,
            "a sweep is running there",
            advice="wait for it, or choose another folder",
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(lock)
