"""Where reports go: the console, metrics.jsonl, Weights & Biases. Sinks get frozen reports and never the trainer."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TextIO

from app.choices import WandbMode
from app.config import Run
from app.engine.live_line import LiveLine
from app.engine.report import RollbackReport, StepReport, ValidationReport
from app.engine.run_folder import METRICS, identity
from app.errors import ConfigError, warn, writing
from app.plan.figures import count_of

REDRAW_S = 0.1  # seconds between redraws of the progress line
ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a Weights & Biases run


class Sink(Protocol):
    """Receives every report."""

    def step(self, report: StepReport) -> None:
        """After each step."""

    def validation(self, report: ValidationReport) -> None:
        """After each validation."""

    def rollback(self, report: RollbackReport) -> None:
        """After the run has gone back to a checkpoint: the steps behind it come again."""

    def note(self, text: str) -> None:
        """Something to be read once."""

    def close(self) -> None:
        """When the run ends."""


class JsonLines:
    """One JSON object per report in metrics.jsonl, which `begin_metrics` has made ready.

    Training goes on where a line cannot be written; it is kept, and written when that works again.
    `gone` is called once the file has been removed or replaced: nothing more is written then.
    """

    def __init__(self, run_dir: Path, gone: Callable[[], None]) -> None:
        self.run_dir, self._gone = run_dir, gone
        self._waiting = b""  # what could not be written yet; may begin within a line
        self._error: OSError | None = None  # of the last attempt
        self._is_gone = False
        self._open()

    def _open(self) -> None:
        with writing(self.run_dir):
            self._file = os.open(self.run_dir / METRICS, os.O_WRONLY | os.O_APPEND)

    def step(self, report: StepReport) -> None:
        """Append a line."""
        self._write(report.metrics())

    def validation(self, report: ValidationReport) -> None:
        """Append a line."""
        self._write(report.metrics())

    def rollback(self, report: RollbackReport) -> None:
        """Append a line to the file from which those of the steps that come again were dropped."""
        os.close(self._file)
        self._open()
        self._write(report.metrics())

    def note(self, text: str) -> None:
        """Not kept: files have numbers."""

    def _write(self, metrics: dict[str, Any]) -> None:
        self._waiting += f"{json.dumps(metrics)}\n".encode()
        self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._is_gone and identity(self._file) != identity(self.run_dir / METRICS):
            self._is_gone = True
            self._gone()
        if self._is_gone:
            return
        failed_before, self._error = self._error, None
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            self._error = error
            if failed_before is None:
                text = "training goes on, and what cannot be written is kept for later"
                warn(f"{self.run_dir / METRICS}: {error.strerror}; {text}")

    def close(self) -> None:
        """Close the file."""
        self._write_waiting()
        os.close(self._file)

    def check(self) -> None:
        """Raise ConfigError where lines are missing at the end."""
        if self._is_gone:
            rule = f"{METRICS} was removed or replaced while this run was writing it"
            raise ConfigError("run_dir", self.run_dir, rule)
        if self._error is not None:
            lines = count_of(self._waiting.count(b"\n"), "line")
            rule = f"{lines} of {METRICS} could not be written: {self._error.strerror}"
            raise ConfigError("run_dir", self.run_dir, rule)


class Console:
    """A bar and a live line on a terminal; on anything else a line per log interval."""

    def __init__(self, run: Run, from_step: int, stream: TextIO | None = None) -> None:
        self.total, self.interval = run.train.steps, run.log.interval
        self.stream = sys.stdout if stream is None else stream
        self.live = LiveLine(self.stream, self.total) if self.stream.isatty() else None
        self.from_step = from_step
        self.recent: deque[float] = deque(maxlen=20)  # ms of the last steps
        self.val_loss: float | None = None
        self.memory = 0.0
        self._drawn = 0.0

    def step(self, report: StepReport) -> None:
        """Draw the line anew, or print it at the log interval."""
        self.recent.append(report.step_ms)
        self.memory = report.memory_peak_gib or self.memory
        text = self._text(report)
        if self.live is None:
            if report.step % self.interval == 0 or report.step in (self.from_step + 1, self.total):
                print(text, file=self.stream, flush=True)
        elif time.monotonic() - self._drawn > REDRAW_S or report.step == self.total:
            self.live.draw(report.step, text)
            self._drawn = time.monotonic()

    def _text(self, report: StepReport) -> str:
        left = median(self.recent) / 1e3 * (self.total - report.step)
        val = f"  val {self.val_loss:.3f}" if self.val_loss is not None else ""
        rate = _short(self._tokens_per_s(report))
        return (
            f"step {report.step}/{self.total}  loss {report.loss:.3f}{val}  {rate} tokens/s  "
            f"{self.memory:.1f} GiB  {_clock(left)} left{'  (update skipped)' if report.skipped else ''}"
        )

    def _tokens_per_s(self, report: StepReport) -> float:
        return report.tokens_per_s * report.step_ms / median(self.recent)

    def validation(self, report: ValidationReport) -> None:
        """Print a line that stays."""
        self.val_loss = report.val_loss
        self._keep(f"step {report.step}/{self.total}  validation loss {report.val_loss:.4f} nats per token")

    def rollback(self, report: RollbackReport) -> None:
        """Print a line that stays."""
        back = f"back to the checkpoint of step {report.step}, with other data"
        self._keep(f"step {report.rollback_from}/{self.total}  loss or gradient norm not finite: {back}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._keep(text)

    def _keep(self, line: str) -> None:
        if self.live is None:
            print(line, file=self.stream, flush=True)
        else:
            self.live.keep(line)

    def close(self) -> None:
        """End the live line."""
        if self.live is not None:
            self.live.end()


def _short(value: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Wandb:
    """A Weights & Biases run in the run folder; a resumed run goes on under the same id."""

    def __init__(self, run: Run, run_dir: Path, config: dict[str, Any]) -> None:
        import wandb  # half a second, and only where it is wanted

        self._forget = wandb.teardown
        self.lost = False  # the service has died
        id_file = run_dir / "wandb_id"
        online = run.log.wandb_mode is WandbMode.online and _logged_in(wandb.login)
        self.interval, self.total = run.log.interval, run.train.steps
        self.run = wandb.init(
            project=run.log.project,
            group=run.log.group,
            name=run_dir.name,
            dir=run_dir,
            config=config,
            id=recorded_id(id_file),
            mode="online" if online else "offline",
            resume="allow" if online else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.run.define_metric("*", step_metric="step")  # a resumed run may log a step again, which W&B's own counter refuses
        id_file.write_text(self.run.id)

    def step(self, report: StepReport) -> None:
        """Log at the interval: the keys of docs/metrics.md, no others."""
        if report.step % self.interval == 0 or report.step == self.total:
            self._attempt(lambda: self.run.log(report.metrics()))

    def validation(self, report: ValidationReport) -> None:
        """Log a validation."""
        self._attempt(lambda: self.run.log(report.metrics()))

    def rollback(self, report: RollbackReport) -> None:
        """Log that steps come again."""
        self._attempt(lambda: self.run.log(report.metrics()))

    def note(self, text: str) -> None:
        """Not kept: metrics have the numbers."""

    def close(self) -> None:
        """Finish the run and its files."""
        self._attempt(self.run.finish)

    def _attempt(self, tell: Callable[[], None]) -> None:
        # The W&B service is a process of its own: SLURM ends it together with the ranks, which still have a step to save.
        if self.lost:
            return
        try:
            tell()
        except Exception as error:
            self.lost = True
            print(f"Weights & Biases has stopped recording ({error!r}); metrics.jsonl goes on", file=sys.stderr)
            with suppress(Exception):
                self._forget()  # or it fails once more when this process ends


def recorded_id(file: Path) -> str | None:
    """Id of the W&B run that goes on, None for a new one. Says so where the file holds no id."""
    if not file.exists():
        return None
    text = file.read_bytes().decode(errors="replace")
    if ID.fullmatch(text):
        return text
    warn(f"{file} holds no id of a Weights & Biases run, so a new one begins")
    return None


def _logged_in(login: Callable[..., bool]) -> bool:
    """Whether the stored credentials work; says so when they do not, since the run is then recorded offline."""
    known = login(prompt=False)
    if not known:
        print("log.wandb_mode=online, but nobody is logged in (`wandb login`): recording offline; `wandb sync` uploads it later.")
    return known
