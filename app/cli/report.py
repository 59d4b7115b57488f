"""A table of runs, as text, CSV and a page: `python -m app.cli.report FOLDER`, a sweep's folder or
any folder of runs.

What a run reached is read from its own files, so it does not matter who started it; sweep.json adds
what never ran, and why.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from math import isnan
from pathlib import Path
from typing import Any, TextIO

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("report")  # the imports take a second

from rich import box
from rich.console import Console
from rich.table import Table

from app.cli.options.messages import readable_errors
from app.cli.run_report.facts import RunFacts, run_facts, settings
from app.cli.sweeps.record import State, Sweep
from app.engine.run.run_folder import CONFIG, RUNS
from app.errors import ConfigError, nearest
from app.plan.formatting import figures

TEXT, CSV, PAGE = "report.txt", "report.csv", "report.html"
WIDTH = 160  # columns where the output is no terminal
COLUMNS = ("run", "tokens/s", "TFLOP/s", "peak GiB", "loss", "state")
HELP = """\
== Graphfold: a table of runs ==
Usage:  python -m app.cli.report FOLDER

  FOLDER   of a sweep (sweeps/<name>), of several runs (runs), or of one run

Prints the table and writes it into FOLDER: report.txt, report.csv, and report.html with plots, one file that needs no network.
Tokens/s and TFLOP/s per rank: median over the second half of a run's steps. Loss: the last validation's; * of the last step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One run, or one that never was."""

    name: str  # of its folder
    label: str  # the overrides that set it apart
    state: State
    reason: str | None  # why it was skipped or failed
    seconds: float | None  # wall time of its last start
    facts: RunFacts

    @property
    def order(self) -> tuple[bool, float, str]:
        """Finished runs by loss, then the others by name."""
        loss = self.facts.final_loss
        if self.state is not State.done or loss is None or isnan(loss):
            return True, 0.0, self.name
        return False, loss, self.name


@dataclass(frozen=True, slots=True)
class Report:
    """A folder of runs."""

    folder: Path
    title: str
    command: str | None  # that began the sweep
    began: str | None  # when, ISO 8601
    rows: tuple[Row, ...]  # best loss first


def read_report(folder: Path) -> Report:
    """What the folder's runs have come to. Raises ConfigError for a folder without any."""
    sweep = Sweep.load(folder) if folder.is_dir() else None
    rows = _rows_of_sweep(sweep) if sweep else _rows_of_runs(folder)
    if not rows:
        known = [
            str(path)
            for parent in (RUNS, Path("sweeps"))
            for path in (parent, *parent.glob("*"))
            if path.is_dir()
        ]
        rule = "holds no run" if folder.exists() else "does not exist"
        raise ConfigError("folder", folder, rule, guess=nearest(str(folder), known))
    command, began = (sweep.command, sweep.began) if sweep else (None, None)
    return Report(
        folder,
        folder.resolve().name,
        command,
        began=began,
        rows=tuple(sorted(rows, key=lambda row: row.order)),
    )


def _rows_of_sweep(sweep: Sweep) -> list[Row]:
    rows = []
    for job in sweep.jobs:
        facts = run_facts(sweep.folder / job.folder)
        # Jobs that another launcher submitted may end after the sweep's own process has.
        ended = facts.finished and job.exit_code is None
        state, reason = (State.done, None) if ended else (job.state, job.reason)
        rows.append(
            Row(job.folder, job.label, state, reason=reason, seconds=job.seconds, facts=facts)
        )
    return rows


def _rows_of_runs(folder: Path) -> list[Row]:
    found = (
        [folder]
        if (folder / CONFIG).exists()
        else sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    )
    asked = {path: settings(path) for path in found}
    differing = sorted(
        {
            key
            for values in asked.values()
            for key in values
            if len({str(v.get(key)) for v in asked.values()}) > 1
        }
    )
    rows = []
    for path, values in asked.items():
        facts = run_facts(path)
        label = (
            " ".join(f"{key}={_typed(values.get(key))}" for key in differing) or path.resolve().name
        )
        rows.append(
            Row(
                path.name,
                label,
                State.done if facts.finished else State.unfinished,
                reason=None,
                seconds=None,
                facts=facts,
            )
        )
    return rows


def _typed(value: Any) -> str:
    """A value as one would type it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return f"[{','.join(map(_typed, value))}]"
        case _:
            return str(value)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, under COLUMNS."""
    facts = row.facts
    loss = (
        ""
        if facts.final_loss is None
        else f"{facts.final_loss:.4f}" + ("*" if facts.val_loss is None else "")
    )
    measured = (facts.tokens_per_s, facts.tflops_per_gpu, facts.memory_peak_gib)
    return (
        row.label,
        *("" if value is None else figures(value) for value in measured),
        loss,
        standing(row),
    )


def standing(row: Row) -> str:
    """The state of a run, how far it came if not to its end, and why."""
    part = (
        f" at step {row.facts.step}/{row.facts.steps}"
        if row.state is not State.done and row.facts.steps
        else ""
    )
    return f"{row.state.value}{part}" + (f": {row.reason}" if row.reason else "")


def print_table(report: Report, stream: TextIO) -> None:
    """The table as text, as wide as a terminal is."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for number, name in enumerate(COLUMNS):
        numeric = 0 < number < len(COLUMNS) - 1
        table.add_column(
            name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold"
        )
    for row in report.rows:
        table.add_row(*cells(row))
    Console(
        file=stream,
        width=None if stream.isatty() else WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    ).print(table)


def as_csv(report: Report) -> str:
    """Every figure at full precision, one line per run."""
    text = StringIO()
    measured = ("step", "steps", "tokens", "tokens_per_s", "tflops_per_gpu", "memory_peak_gib",
                "memory_planned_gib", "loss", "val_loss")  # fmt: skip
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run", "overrides", "state", "reason", "seconds", *measured))
    for row in report.rows:
        figures_of = [getattr(row.facts, name) for name in measured]
        writer.writerow(
            (row.name, row.label, row.state.value, row.reason, row.seconds, *figures_of)
        )
    return text.getvalue()


def report(folder: Path) -> None:
    """Print the table and write report.txt, report.csv and report.html into the folder. Raises
    ConfigError.
    """
    from app.cli.run_report.page import page  # matplotlib takes its time to load

    found = read_report(folder)
    text = StringIO()
    print_table(found, text)
    print_table(found, sys.stdout)
    contents = {TEXT: text.getvalue(), CSV: as_csv(found), PAGE: page(found)}
    try:
        for name, content in contents.items():
            (folder / name).write_text(content)
    except OSError as error:
        raise ConfigError("folder", folder, f"cannot be written: {error.strerror}") from error
    print(f"written: {', '.join(str(folder / name) for name in contents)}")


def main(arguments: Sequence[str]) -> int:
    """Report on the one folder named; returns the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(HELP)
        return 0
    with readable_errors("report", speak=True):
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise ConfigError(
                "arguments",
                " ".join(arguments),
                "name one folder",
                advice="for example python -m app.cli.report sweeps/<name>",
            )
        report(Path(arguments[0]))
    return 0


def command() -> None:
    """Run the command line; SystemExit with the exit code."""
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    command()
