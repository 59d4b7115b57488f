"""Launcher of sweeps on this host: one job after another, each in fresh processes, with one line of
progress.

A job runs as `python train.py …` would: one process, or torchrun with the ranks of its layout on a
free port. Its output goes to job.log in its run folder, its state to the sweep's sweep.json.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from app.cli.options.arguments import Typed, key_of
from app.cli.processes.ctrl_c import interrupt_again
from app.cli.processes.environment import environment
from app.cli.processes.launcher import STARTED_AS, started_as
from app.cli.processes.parent import bound
from app.cli.run_report.facts import clock, run_facts, settings
from app.cli.run_report.sweep_record import JOB_LOG, Job, JobState, Sweep, left_to_sweep, locked
from app.engine.files.metric_lines import BadLineError, row_of
from app.engine.files.run_folder import METRICS
from app.errors import CLEAR, ConfigError
from app.plan.formatting import amount
from app.programs import command_name
from app.shell import quoted

POLL_S = 0.5  # seconds between reads of a job's metrics.jsonl
TAIL = 1 << 14  # bytes read from the end of a file
REASON = 300  # longest reason kept, characters
STOPPED = (75, 130, -signal.SIGTERM, -signal.SIGINT)  # exit codes of a job stopped by a signal
# Lines of a log that name the error: ours, SLURM's, or the end of a stack trace. torchrun's line
# about a failed rank only counts if a signal ended the rank; otherwise the rank printed the error.
OWN = r"(?:train\.py|graphfold-train): "  # of either, as started
SAID = (
    rf"{OWN}|slurmstepd: error: |torchrun: (?!.*ended with exit code)"
    r"|(?!.*ChildFailedError)[\w.]+(?:Error|Exception)\b"
)
TOLD = re.compile(rf"^(?:\[rank\d+\]: ?)?((?:{SAID}).*)$", re.MULTILINE)


def run_jobs(
    script: str, folder: Path, job_overrides: Sequence[Sequence[str]], typed: Typed
) -> list[JobReturn]:
    """Run the jobs of the sweep in `folder` that have these overrides, one after another.

    `typed` holds the flags passed to every job. A job returns its best validation loss in nats per
    token; if one fails, it is recorded and the next begins. Raises KeyboardInterrupt if one was
    interrupted.
    """
    command = [sys.executable, script, *typed.words]
    return [_run(command, folder, list(overrides)) for overrides in job_overrides]


def run_trials(
    script: str,
    folder: Path,
    job_overrides: Sequence[Sequence[str]],
    *,
    typed: Typed,
    fixed: Sequence[str],
    log: DictConfig,
) -> list[JobReturn]:
    """Record jobs that another sweeper has chosen, such as Optuna's trials, and run them like
    `run_jobs`.

    `fixed` are keys with the same value in all jobs, left out of their labels. `log` is the config
    section that says where they report to.
    """
    interrupt_again()
    with locked(folder):
        asked = f"{command_name('train')} {shlex.join(sys.argv[1:])}"
        began = time.strftime("%Y-%m-%dT%H:%M:%S")
        sweep = Sweep.load(folder) or Sweep(folder, asked, began, jobs=())
        taken = len(sweep.jobs)
        jobs = [_job(folder, taken + n, each, fixed=fixed) for n, each in enumerate(job_overrides)]
        dataclasses.replace(sweep, jobs=(*sweep.jobs, *jobs)).save()
        left = left_to_sweep(log, sweep.name)
        also = ["log.console=false", *(f"log.{key}={quoted(value)}" for key, value in left.items())]
        arguments = [[*job.overrides, *also] for job in jobs]
        return run_jobs(script, folder, arguments, typed=typed)


def _job(folder: Path, number: int, overrides: Sequence[str], fixed: Sequence[str]) -> Job:
    name = f"{number:03}"  # a number, because a sweeper may choose the same values twice
    swept = tuple(override for override in overrides if key_of(override) not in fixed)
    return Job(number, name, (*overrides, f"run_dir={quoted(folder / name)}"), swept=swept)


def _run(command: Sequence[str], folder: Path, overrides: list[str]) -> JobReturn:
    job, title = _note(folder, overrides, state=JobState.running)
    run_dir = folder / job.folder
    began = time.monotonic()
    line = ProgressLine(title, run_dir)
    code, told_to_end = run_process([*command, *overrides], run_dir, line)
    state, reason = outcome(code, told_to_end, run_dir)
    seconds = round(time.monotonic() - began, 1)
    job, _ = _note(folder, overrides, state=state, reason=reason, exit_code=code, seconds=seconds)
    line.end(closing(job, run_dir))
    if told_to_end:
        raise KeyboardInterrupt
    if state is JobState.failed:
        error = ConfigError("job", title, reason or f"ended with {code}")
        return JobReturn(overrides, status=JobStatus.FAILED, _return_value=error)
    return JobReturn(
        overrides, status=JobStatus.COMPLETED, _return_value=run_facts(run_dir).best_loss
    )


def _note(folder: Path, overrides: Sequence[str], **changes: Any) -> tuple[Job, str]:
    """Record a change of the job's state; return the job and its title."""
    sweep = Sweep.load(folder)
    assert sweep is not None, "jobs are recorded before they run"
    sweep = sweep.changed(sweep.job_of(overrides).number, **changes)
    sweep.save()
    job = sweep.job_of(overrides)
    return job, sweep.title(job)


def run_process(command: Sequence[str], run_dir: Path, line: ProgressLine) -> tuple[int, bool]:
    """Run a job to its end; return its exit code, and whether this process was interrupted.

    The first interrupt tells the job to end and waits for it, a second one kills it. The job has a
    session of its own, so that Ctrl-C reaches only this process; it inherits the sweep's lock.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / JOB_LOG).open("wb") as log:
        process = subprocess.Popen(
            bound(command),
            env={**environment(), STARTED_AS: started_as(sys.argv[0])},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=False,
        )
    try:
        return line.follow(process), False
    except KeyboardInterrupt:
        process.terminate()
        line.draw("ending the job; Ctrl-C again kills it")
    try:
        return process.wait(), True
    except KeyboardInterrupt:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait(), True


def outcome(code: int, told_to_end: bool, run_dir: Path) -> tuple[JobState, str | None]:
    """Return a job's final state and, if it failed, the reason: last error line or exit code."""
    if code == 0:
        return JobState.done, None
    if told_to_end or code in STOPPED:
        return JobState.interrupted, None
    ended = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    return JobState.failed, last_told(run_dir / JOB_LOG) or ended


def last_told(log: Path) -> str | None:
    """Return the last line of a log that names an error; None without one."""
    told = TOLD.findall(_tail(log))
    return re.sub(f"^{OWN}", "", told[-1])[:REASON].rstrip() if told else None


def closing(job: Job, run_dir: Path) -> str:
    """Return a job's result in a few words: state, duration, loss or reason."""
    took = clock(job.seconds or 0)
    if job.state is JobState.done:
        loss = run_facts(run_dir).final_loss
        return f"done in {took}" + ("" if loss is None else f", loss {loss:.4f}")
    return f"{job.state.value} after {took}" + (f": {job.reason}" if job.reason else "")


class ProgressLine:
    """Progress line of a job: redrawn on a terminal while the job runs; elsewhere printed when the
    job begins and ends.
    """

    def __init__(self, title: str, run_dir: Path, stream: TextIO | None = None) -> None:
        self.title = title
        self.run_dir = run_dir
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()

    def follow(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the job and show its progress; return its exit code."""
        if not self.live:
            self.draw("started")
            return process.wait()
        while True:
            self.draw(progress(self.run_dir))
            with suppress(subprocess.TimeoutExpired):
                return process.wait(POLL_S)

    def draw(self, text: str) -> None:
        """Show the line with this text."""
        line = f"{self.title}  {text}"
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            line = f"\r{line[:width]:<{width}}"
        print(line, end="" if self.live else "\n", file=self.stream, flush=True)

    def end(self, text: str) -> None:
        """Print the line a last time, untruncated, and leave it."""
        start = CLEAR if self.live else ""
        print(f"{start}{self.title}  {text}", file=self.stream, flush=True)


def progress(run_dir: Path) -> str:
    """Return a running job's progress, read from the end of its metrics.jsonl."""
    rows = list(_last_steps(run_dir))
    steps = settings(run_dir).get("train.steps")
    if not rows or not steps:
        return "starting"
    last = rows[-1]
    usual_ms = median(row["step_ms"] for row in rows)
    left = usual_ms / 1e3 * (steps - last["step"])
    rate = last["tokens_per_s"] * last["step_ms"] / usual_ms
    return (
        f"step {last['step']}/{steps}  loss {last['loss']:.3f}  {amount(rate)} tokens/s  "
        f"{clock(left)} left"
    )


def _last_steps(run_dir: Path) -> Iterator[dict[str, Any]]:
    for line in _tail(run_dir / METRICS).splitlines():
        with suppress(BadLineError):  # the first line read is cut, and the last may be
            row = row_of(line)
            if "loss" in row and "step_ms" in row:
                yield row


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        return file.read().decode(errors="replace")
