"""Launcher of sweeps on this host: jobs in fresh processes, one after another or side by side
(`app.cli.sweeps.places`), with one line of progress each.

A job runs as `python train.py …` would: one process, or torchrun with the ranks of its layout on a
free port. Its output goes to job.log in its run folder, its state to the sweep's sweep.json.
"""

from __future__ import annotations

import dataclasses
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig

from app.cli.options.arguments import OUR_SEARCH, Typed, is_share, key_of
from app.cli.processes.ctrl_c import interrupt_again
from app.cli.processes.environment import environment
from app.cli.processes.launcher import STARTED_AS, started_as
from app.cli.processes.parent import bound
from app.cli.run_report.facts import clock, run_facts
from app.cli.run_report.sweep_record import JOB_LOG, Job, JobState, Sweep, left_to_sweep, locked
from app.cli.sweeps.job_lines import JobLines, end_of, progress
from app.cli.sweeps.places import ALONE, Place
from app.errors import JobFailedError, writing
from app.own_files import fresh_file
from app.programs import command_name
from app.shell import quoted

POLL_S = 0.5  # seconds between redraws of the jobs' lines
REASON = 300  # longest reason kept, characters
# exit codes of a job stopped by a signal; 143: before its ranks began
STOPPED = (75, 130, 143, -signal.SIGTERM, -signal.SIGINT)
# Lines of a log that name the error: ours, SLURM's, or the end of a stack trace. torchrun's line
# about a failed rank only counts if a signal ended the rank; otherwise the rank printed the error.
OWN = r"(?:train\.py|graphfold-train): "  # of either, as started
SAID = (
    rf"{OWN}|slurmstepd: error: |torchrun: (?!.*ended with exit code)"
    r"|(?!.*ChildFailedError)[\w.]+(?:Error|Exception)\b"
)
TOLD = re.compile(rf"^(?:\[rank\d+\]: ?)?((?:{SAID}).*)$", re.MULTILINE)


def run_jobs(
    script: str,
    folder: Path,
    job_overrides: Sequence[Sequence[str]],
    *,
    typed: Typed,
    places: Sequence[Place] = ALONE,
    of: int | None = None,
) -> list[JobReturn]:
    """Run the jobs of the sweep in `folder` that have these overrides, one at each of the `places`
    at a time.

    `typed` holds the flags passed to every job; `of` as in `Sweep.title`. A job
    returns its best validation loss in nats per token; if one fails, it is recorded and the next
    begins. Raises KeyboardInterrupt if one was interrupted.
    """
    jobs = SideBySide([sys.executable, script, *typed.words], folder, places, of=of)
    return jobs.run([list(overrides) for overrides in job_overrides])


def run_trials(
    script: str,
    folder: Path,
    job_overrides: Sequence[Sequence[str]],
    *,
    typed: Typed,
    fixed: Sequence[str],
    log: DictConfig,
    places: Sequence[Place] = ALONE,
    more: int | None = None,
) -> list[JobReturn]:
    """Record jobs that another sweeper has chosen, such as Optuna's trials, and run them like
    `run_jobs`.

    `fixed` are keys with the same value in all jobs, left out of their labels. `log` is the config
    section that says where they report to; `more` the number of jobs from these on, if known.
    """
    interrupt_again()
    own = [[word for word in each if not is_share(word)] for each in job_overrides]
    with locked(folder):
        words = [word for word in sys.argv[1:] if word != OUR_SEARCH]
        asked = f"{command_name('train')} {shlex.join(words)}"
        began = time.strftime("%Y-%m-%dT%H:%M:%S")
        sweep = Sweep.load(folder) or Sweep(folder, asked, began, jobs=())
        taken = len(sweep.jobs)
        jobs = [_job(folder, taken + n, each, fixed=fixed) for n, each in enumerate(own)]
        dataclasses.replace(sweep, jobs=(*sweep.jobs, *jobs)).save()
        left = left_to_sweep(log, sweep.name)
        also = ["log.console=false", *(f"log.{key}={quoted(value)}" for key, value in left.items())]
        arguments = [[*job.overrides, *also] for job in jobs]
        of = None if more is None else taken + more
        return run_jobs(script, folder, arguments, typed=typed, places=places, of=of)


def _job(folder: Path, number: int, overrides: Sequence[str], fixed: Sequence[str]) -> Job:
    name = f"{number:03}"  # a number, because a sweeper may choose the same values twice
    swept = tuple(override for override in overrides if key_of(override) not in fixed)
    return Job(number, name, (*overrides, f"run_dir={quoted(folder / name)}"), swept=swept)


class Returned(JobReturn):
    """Result of a job, of which a sweeper asks for the value; Hydra's own prints a second line."""

    @property
    def return_value(self) -> Any:
        """Return the loss; raises JobFailedError for a job that failed."""
        if self.status is JobStatus.FAILED:
            raise JobFailedError
        return self._return_value

    @return_value.setter
    def return_value(self, value: Any) -> None:
        self._return_value = value


@dataclass(frozen=True, slots=True)
class Running:
    """A job that runs."""

    index: int  # among the jobs of this launch
    overrides: list[str]
    title: str
    run_dir: Path
    place: Place
    process: subprocess.Popen[bytes]
    began: float  # time.monotonic()


class SideBySide:
    """Jobs of a sweep, of which one runs at each place at a time.

    One thread starts, watches and records them all, so sweep.json has a single writer.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        places: Sequence[Place],
        *,
        of: int | None = None,
    ) -> None:
        """`command` starts a job, whose overrides follow; `places` has the variables of each; `of`
        as in `Sweep.title`.
        """
        self.of = of
        self.command = command
        self.folder = folder
        self.free = deque(places)
        self.running: list[Running] = []
        self.returns: dict[int, JobReturn] = {}
        self.lines = JobLines()

    def run(self, job_overrides: Sequence[list[str]]) -> list[JobReturn]:
        """Run the jobs to their ends and return their results, in the order given.

        The first interrupt tells all that run to end and waits for them, a second one kills them;
        raises KeyboardInterrupt then.
        """
        waiting = deque(enumerate(job_overrides))
        try:
            while waiting or self.running:
                while waiting and self.free:
                    self._start(*waiting.popleft())
                self._watch()
        except BaseException:
            self._end_all()
            raise
        return [self.returns[index] for index in range(len(job_overrides))]

    def _start(self, index: int, overrides: list[str]) -> None:
        job, sweep = _note(self.folder, overrides, state=JobState.running)
        title = sweep.title(job, self.of)
        run_dir = self.folder / job.folder
        place = self.free.popleft()
        process = start_process([*self.command, *overrides], run_dir, place)
        began = time.monotonic()
        self.running.append(Running(index, overrides, title, run_dir, place, process, began))
        self.lines.begin(title)

    def _watch(self) -> None:
        """Wait until a job has ended, or it is time to redraw; record those that have ended."""
        if self.lines.live:
            self.lines.redraw([f"{each.title}  {progress(each.run_dir)}" for each in self.running])
        processes = [each.process for each in self.running]
        wait_for_any(processes, POLL_S if self.lines.live else None)
        for each in tuple(self.running):
            if (code := each.process.poll()) is not None:
                self._record(each, code, told_to_end=False)

    def _record(self, ended: Running, code: int, told_to_end: bool) -> None:
        state, reason = outcome(code, told_to_end, ended.run_dir)
        seconds = round(time.monotonic() - ended.began, 1)
        changes = {"state": state, "reason": reason, "exit_code": code, "seconds": seconds}
        job, _ = _note(self.folder, ended.overrides, **changes)
        self.running.remove(ended)
        self.free.append(ended.place)
        self.lines.keep(f"{ended.title}  {closing(job, ended.run_dir)}")
        failed = state is JobState.failed
        self.returns[ended.index] = Returned(
            ended.overrides,
            status=JobStatus.FAILED if failed else JobStatus.COMPLETED,
            _return_value=None if failed else run_facts(ended.run_dir).best_loss,
        )

    def _end_all(self) -> None:
        """Tell the running jobs to end, and wait for them; on Ctrl-C kill them."""
        for each in self.running:
            each.process.terminate()
        told = "ending the job; Ctrl-C again kills it"
        if self.running:
            self.lines.show([f"{each.title}  {told}" for each in self.running])
        try:
            for each in self.running:
                each.process.wait()
        except KeyboardInterrupt:
            for each in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(each.process.pid, signal.SIGKILL)
        for each in tuple(self.running):
            self._record(each, each.process.wait(), told_to_end=True)


def _note(folder: Path, overrides: Sequence[str], **changes: Any) -> tuple[Job, Sweep]:
    """Record a change of the job's state; return the job and its sweep."""
    sweep = Sweep.load(folder)
    assert sweep is not None, "jobs are recorded before they run"
    sweep = sweep.changed(sweep.job_of(overrides).number, **changes)
    sweep.save()
    return sweep.job_of(overrides), sweep


def start_process(command: Sequence[str], run_dir: Path, place: Place) -> subprocess.Popen[bytes]:
    """Start a job with the variables of its place; its output goes to job.log.

    The job has a session of its own, so that Ctrl-C reaches only this process; it inherits the
    sweep's lock. Raises ConfigError.
    """
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        log = fresh_file(run_dir / JOB_LOG)
    with log:
        return subprocess.Popen(
            bound(command),
            env={**environment(), STARTED_AS: started_as(sys.argv[0]), **place},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=False,
        )


def wait_for_any(processes: Sequence[subprocess.Popen[bytes]], seconds: float | None) -> None:
    """Sleep until one of these processes has ended, for `seconds` at most."""
    if len(processes) == 1:
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(seconds)
        return
    try:
        with ExitStack() as stack:
            handles = [os.pidfd_open(process.pid) for process in processes]
            for handle in handles:
                stack.callback(os.close, handle)
            select.select(handles, [], [], seconds)
    except (AttributeError, OSError):  # a system without such handles
        time.sleep(POLL_S)


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
    told = TOLD.findall(end_of(log))
    return re.sub(f"^{OWN}", "", told[-1])[:REASON].rstrip() if told else None


def closing(job: Job, run_dir: Path) -> str:
    """Return a job's result in a few words: state, duration, loss or reason."""
    took = clock(job.seconds or 0)
    if job.state is JobState.done:
        loss = run_facts(run_dir).final_loss
        return f"done in {took}" + ("" if loss is None else f", loss {loss:.4f}")
    return f"{job.state.value} after {took}" + (f": {job.reason}" if job.reason else "")
