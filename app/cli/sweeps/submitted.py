"""Jobs that another launcher submits: submit them, and read how they ended.

submitit writes into the sweep's folder, below .submitit/<job>/:
    <job>_submitted.pkl          the submitted function and its arguments
    <job>_<task>_log.{err,out}   output of each task; a requeued job appends to it
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from pathlib import Path

from app.cli.run_report.facts import run_facts
from app.cli.run_report.sweep_record import JobState
from app.cli.sweeps.jobs import REASON, last_told
from app.errors import ConfigError

SUBMITIT = ".submitit"  # in the sweep's folder
STOPPED = "stopped by SIG"  # beginning of the line that a run prints when a signal stops it
BY_SLURM = "slurmstepd: "  # beginning of the line that SLURM prints when it ends a job


def submit(
    name: str, launch: Callable[[], object], folder: Path, run_dirs: Sequence[Path]
) -> str | None:
    """Let the launcher called `name` submit jobs and wait for them; return the text of an error
    that it raised after some had begun, or None.

    Raises ConfigError if no job could be submitted; the launcher's own output is dropped.
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
            raise ConfigError("hydra/launcher", name, problem, nearest="torchrun") from error
        return problem
    finally:
        sys.stderr.write(printed.getvalue())
    return None


def _submitted(folder: Path) -> set[Path]:
    found = (folder / SUBMITIT).glob("*/*_submitted.pkl")
    return {path for path in found if path.is_file()}


def _in_a_line(error: Exception) -> str:
    lines = (re.sub(r"^sbatch: (error: )?", "", line).strip() for line in str(error).splitlines())
    return "; ".join(filter(None, lines))[:REASON].rstrip() or type(error).__name__


def how_it_ended(
    folder: Path, run_dir: Path, argument: str, problem: str | None
) -> tuple[JobState, str | None]:
    """Return state and reason of the submitted job that has `argument` among its own, read from its
    files.

    `problem` is the launcher's error, used as the reason if the job's logs have none: it may be
    about another job.
    """
    if run_facts(run_dir).finished:
        return JobState.done, None
    reason = _last_told(_logs(folder, argument))
    if reason and reason.startswith(STOPPED):
        return JobState.interrupted, reason
    return (
        JobState.failed,
        reason or problem or f"ended before its last step; its output is in {folder / SUBMITIT}",
    )


def _logs(folder: Path, argument: str) -> list[Path]:
    """Return the logs of a job's tasks in its newest submission, in order of their last write."""
    # Search the pickle's bytes for the argument, which is stored as plain text: unpickling would
    # import the submitted function.
    ours = [path for path in _submitted(folder) if argument.encode() in path.read_bytes()]
    newest = max(ours, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return []
    logs = newest.parent.glob(f"{newest.stem.removesuffix('_submitted')}_*_log.*")
    return sorted(logs, key=lambda path: path.stat().st_mtime_ns)


def _last_told(logs: Sequence[Path]) -> str | None:
    """Return SLURM's reason for ending a job, or else the last error of the task that ended first:
    the other tasks fail as a consequence.
    """
    reasons = [reason for log in logs if (reason := last_told(log))]
    by_slurm = [reason for reason in reasons if reason.startswith(BY_SLURM)]
    return next(iter(by_slurm or reasons), None)
