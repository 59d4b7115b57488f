"""Jobs that another launcher submits: what comes of an attempt to submit them, and how they ended.

submitit keeps in the sweep's folder what it has submitted, .submitit/<job>/<job>_submitted.pkl, a
function and its arguments, and what that prints, <job>_<task>_log.{err,out}; a job that SLURM
starts again appends to them.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from app.cli.run_report.facts import run_facts
from app.cli.sweeps.jobs import REASON, last_told
from app.cli.sweeps.record import RECORD, JobState
from app.errors import ConfigError

SUBMITIT = ".submitit"  # in the sweep's folder
STOPPED = "stopped by SIG"  # begins what a run says that was told to end
BY_SLURM = "slurmstepd: "  # begins what SLURM says when it ends a job itself


class NotSubmittedError(ConfigError):
    """No job could be submitted."""


def missing(folder: Path) -> Path | None:
    """The topmost part of a path that does not exist; None where all does."""
    return next((path for path in (*reversed(folder.parents), folder) if not path.exists()), None)


@contextmanager
def taken_back(folder: Path, made: Path | None) -> Iterator[None]:
    """Leave a sweep's folder as it was where no job could be submitted; what `missing` has found
    before is removed again.
    """
    record = folder / RECORD
    before = _entries(folder)
    recorded = record.read_bytes() if record.exists() else None
    try:
        yield
    except NotSubmittedError:
        for path in _entries(folder) - before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # it may have gone with its folder
        if recorded is not None:
            record.write_bytes(recorded)
        if made is not None:
            shutil.rmtree(made)
        raise


def _entries(folder: Path) -> set[Path]:
    parent = folder / SUBMITIT
    return (
        set(folder.iterdir()) | set(parent.iterdir()) if parent.exists() else set(folder.iterdir())
    )


def submit(
    name: str, launch: Callable[[], object], folder: Path, run_dirs: Sequence[Path]
) -> str | None:
    """Let the launcher called `name` submit jobs and wait for them; returns what it raised once
    some had begun, or None.

    Raises NotSubmittedError where none could be submitted, in place of what was printed about that.
    """
    before = _submitted(folder)
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            launch()
    except Exception as error:
        problem = _in_a_line(error)
        if _submitted(folder) == before and not any(run_dir.exists() for run_dir in run_dirs):
            printed.truncate(0)
            raise NotSubmittedError("hydra/launcher", name, problem, nearest="torchrun") from error
        return problem
    finally:
        sys.stderr.write(printed.getvalue())
    return None


def _submitted(folder: Path) -> set[Path]:
    return set((folder / SUBMITIT).glob("*/*_submitted.pkl"))


def _in_a_line(error: Exception) -> str:
    lines = (re.sub(r"^sbatch: (error: )?", "", line).strip() for line in str(error).splitlines())
    return "; ".join(filter(None, lines))[:REASON].rstrip() or type(error).__name__


def how_it_ended(
    folder: Path, run_dir: Path, argument: str, problem: str | None
) -> tuple[JobState, str | None]:
    """State and reason of a job that ran elsewhere with `argument` among its own, from its files.

    `problem` is what the launcher raised, which may be about another job.
    """
    if run_facts(run_dir).finished:
        return JobState.done, None
    reason = _last_told(_logs(folder, argument))
    if reason and reason.startswith(STOPPED):
        return JobState.interrupted, reason
    return (
        JobState.failed,
        reason
        or problem
        or f"ended before its last step; what it printed is in {folder / SUBMITIT}",
    )


def _logs(folder: Path, argument: str) -> list[Path]:
    """What a job's tasks have printed, first the one that ended first; of the newest submission."""
    # Arguments are plain text in a pickle, whatever it takes to load the function.
    ours = [path for path in _submitted(folder) if argument.encode() in path.read_bytes()]
    newest = max(ours, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return []
    logs = newest.parent.glob(f"{newest.stem.removesuffix('_submitted')}_*_log.*")
    return sorted(logs, key=lambda path: path.stat().st_mtime_ns)


def _last_told(logs: Sequence[Path]) -> str | None:
    """Why SLURM ended a job, or else the last error of the task that ended first: others follow
    it with errors of their own.
    """
    reasons = [reason for log in logs if (reason := last_told(log))]
    by_slurm = [reason for reason in reasons if reason.startswith(BY_SLURM)]
    return next(iter(by_slurm or reasons), None)
