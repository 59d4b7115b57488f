"""Loggers of reports ("sinks"): console and metrics.jsonl; experiment trackers are in `trackers`.

Sinks receive reports and never the trainer. The sinks of `app.model.layers.weight_grads` are
unrelated: they receive weight gradients.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TextIO

from app.config import Run
from app.engine.files.metric_lines import line_of
from app.engine.files.run_folder import METRICS, identity
from app.engine.report.live_line import GAP, LiveLine
from app.engine.step.records import RecoveryReport, RollbackReport, StepReport, ValidationReport
from app.errors import ConfigError, warn, writing
from app.own_files import make_own, open_own
from app.plan.formatting import amount, count_of

REDRAW_S = 0.1  # seconds between redraws of the progress line
# Parts that the progress line leaves out of a narrow terminal, first to last; the time left stays.
DROPS = ("memory", "rate", "val", "reruns", "step", "loss", "skipped")


class Sink(Protocol):
    """Logger: receives every report."""

    def step(self, report: StepReport) -> None:
        """Receive the report of a step."""

    def validation(self, report: ValidationReport) -> None:
        """Receive the report of a validation."""

    def rollback(self, report: RollbackReport) -> None:
        """Receive a rollback to a checkpoint, after which later steps are repeated."""

    def note(self, text: str) -> None:
        """Receive a line for the user."""

    def sample(self, step: int, text: str) -> None:
        """Receive the text that the trained model generated."""

    def close(self) -> None:
        """Finish at the end of the run."""


class JsonLines:
    """Writer of metrics.jsonl, one JSON object per report; `begin_metrics` has prepared the file.

    Training continues if a line cannot be written; the line is kept and written when that works
    again. Once the file has been removed or replaced, `gone` is called and writing ends.
    """

    def __init__(self, run_dir: Path, gone: Callable[[], None]) -> None:
        self.run_dir = run_dir
        self._gone = gone
        self._waiting = b""  # bytes not yet written; may begin within a line
        self._error: OSError | None = None  # of the last attempt
        self._is_gone = False
        self._open()

    def _open(self) -> None:
        with writing(self.run_dir):
            self._file = open_own(self.run_dir / METRICS, append=True)

    def step(self, report: StepReport) -> None:
        """Append a line."""
        self._write(report.metrics())

    def validation(self, report: ValidationReport) -> None:
        """Append a line."""
        self._write(report.metrics())

    def rollback(self, report: RollbackReport) -> None:
        """Append a line to the new file, in which lines of repeated steps were dropped."""
        os.close(self._file)
        self._open()
        self._write(report.metrics())

    def recovery(self, report: RecoveryReport) -> None:
        """Append a line."""
        self._write(report.metrics())

    def note(self, text: str) -> None:
        """No-op: the file holds numbers only."""

    def sample(self, step: int, text: str) -> None:
        """No-op: the file holds numbers only."""

    def _write(self, metrics: dict[str, Any]) -> None:
        self._waiting += line_of(metrics).encode()
        self._write_waiting()

    def _write_waiting(self) -> None:
        if not self._is_gone and identity(self._file) != identity(self.run_dir / METRICS):
            self._is_gone = True
            self._gone()
        if self._is_gone:
            return
        failed_before = self._error
        self._error = None
        try:
            self._leave_copies()
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            self._error = error
            if failed_before is None:
                text = "training continues, and unwritten lines are kept for later"
                warn(f"{self.run_dir / METRICS}: {error.strerror}; {text}")

    def _leave_copies(self) -> None:
        """Continue in a copy if `cp -al` has given the file a second name. Raises OSError."""
        if os.fstat(self._file).st_nlink > 1:
            make_own(self.run_dir / METRICS)
            before, self._file = self._file, open_own(self.run_dir / METRICS, append=True)
            os.close(before)

    def close(self) -> None:
        """Close the file."""
        self._write_waiting()
        os.close(self._file)

    def check(self) -> None:
        """Raise ConfigError if the file lacks lines at the end of the run."""
        if self._is_gone:
            rule = f"{METRICS} was removed or replaced while this run was writing it"
            raise ConfigError("run_dir", self.run_dir, rule)
        if self._error is not None:
            lines = count_of(self._waiting.count(b"\n"), "line")
            rule = f"{lines} of {METRICS} could not be written: {self._error.strerror}"
            raise ConfigError("run_dir", self.run_dir, rule)


class Console:
    """Console output: a live line on a terminal, elsewhere a line per log interval."""

    def __init__(self, run: Run, from_step: int, stream: TextIO | None = None) -> None:
        self.total = run.steps
        self.interval = run.log.interval
        self.stream = sys.stdout if stream is None else stream
        self.live = LiveLine(self.stream, self.total, DROPS) if self.stream.isatty() else None
        self.from_step = from_step
        self.recent: deque[float] = deque(maxlen=20)  # ms of the last steps
        self.val_loss: float | None = None
        self.memory = 0.0
        self._drawn = 0.0

    def step(self, report: StepReport) -> None:
        """Redraw the live line, or print a line at the log interval."""
        self.recent.append(report.step_ms)
        self.memory = report.memory_peak_gib or self.memory
        if self.live is None:
            if report.step % self.interval == 0 or report.step in (self.from_step + 1, self.total):
                print(GAP.join(self._parts(report).values()), file=self.stream, flush=True)
        elif time.monotonic() - self._drawn > REDRAW_S or report.step == self.total:
            self.live.draw(report.step, self._parts(report))
            self._drawn = time.monotonic()

    def _parts(self, report: StepReport) -> dict[str, str]:
        """Return the parts of a step's line by name, in order."""
        left = median(self.recent) / 1e3 * (self.total - report.step)
        parts = {"step": f"step {report.step}/{self.total}", "loss": f"loss {report.loss:.3f}"}
        if self.val_loss is not None:
            parts["val"] = f"val {self.val_loss:.3f}"
        parts["rate"] = f"{amount(self._tokens_per_s(report))} tokens/s"
        parts["memory"] = f"{self.memory:.1f} GiB"
        parts["left"] = f"{_clock(left)} left"
        if report.skipped:
            parts["skipped"] = "(update skipped)"
        if report.reruns:
            parts["reruns"] = "(rerun)"
        return parts

    def _tokens_per_s(self, report: StepReport) -> float:
        return report.tokens_per_s * report.step_ms / median(self.recent)

    def validation(self, report: ValidationReport) -> None:
        """Print a line that stays."""
        if report.step:  # that of random weights would stand beside better losses for long
            self.val_loss = report.val_loss
        self._keep(
            f"step {report.step}/{self.total}  validation loss {report.val_loss:.4f} nats per token"
        )

    def rollback(self, report: RollbackReport) -> None:
        """Print a line that stays."""
        self._keep(f"step {report.rollback_from}/{self.total}  {report}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._keep(text)

    def sample(self, step: int, text: str) -> None:
        """No-op: `sum_up` prints it beside the result."""

    def _keep(self, line: str) -> None:
        if self.live is None:
            print(line, file=self.stream, flush=True)
        else:
            self.live.keep(line)

    def close(self) -> None:
        """End the live line."""
        if self.live is not None:
            self.live.end()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
