"""Lines of a sweep's jobs: on a terminal redrawn while they run; elsewhere printed when a job
begins and ends.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from app.cli.run_report.facts import clock, settings
from app.engine.files.metric_lines import BadLineError, row_of
from app.engine.files.run_folder import METRICS
from app.errors import ConfigError
from app.own_files import open_regular
from app.plan.formatting import amount

TAIL = 1 << 14  # bytes read from the end of a file
CLEAR_BELOW = "\r\x1b[J"  # clears this line of a terminal and those below


class JobLines:
    """Lines of the jobs that run, below those of jobs that have ended."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.live = self.stream.isatty()

    def begin(self, title: str) -> None:
        """Tell that a job has begun; on a terminal `redraw` does."""
        if not self.live:
            print(f"{title}  started", file=self.stream, flush=True)

    def redraw(self, texts: Sequence[str]) -> None:
        """Show these lines in place of those last shown, as many as the terminal has room for.

        The cursor stays in the first one, so that the next line begins there.
        """
        columns, rows = shutil.get_terminal_size()
        if len(texts) >= rows:
            texts = [*texts[: rows - 2], f"… and {len(texts) - rows + 2} more jobs"]
        width = columns - 1
        drawn = "\n".join(f"\r{text[:width]:<{width}}" for text in texts)
        up = f"\x1b[{len(texts) - 1}A" if len(texts) > 1 else ""
        print(f"{drawn}{up}", end="", file=self.stream, flush=True)

    def keep(self, text: str) -> None:
        """Print a permanent line, untruncated."""
        print(f"{CLEAR_BELOW if self.live else ''}{text}", file=self.stream, flush=True)

    def show(self, texts: Sequence[str]) -> None:
        """Redraw on a terminal, else print each line once."""
        if self.live:
            self.redraw(texts)
        else:
            print("\n".join(texts), file=self.stream, flush=True)


def progress(run_dir: Path) -> str:
    """Return a running job's progress, read from the end of its metrics.jsonl."""
    rows = list(_last_steps(run_dir))
    try:
        steps = settings(run_dir).get("train.steps")
    except ConfigError:  # told when its results are read
        steps = None
    if not rows or type(steps) is not int:
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
    for line in end_of(run_dir / METRICS).splitlines():
        with suppress(BadLineError):  # the first line read is cut, and the last may be
            row = row_of(line)
            if "loss" in row and "step_ms" in row:
                yield row


def end_of(path: Path) -> str:
    """Return the end of a file as text; empty if there is none that can be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
