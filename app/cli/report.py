"""Write a table of runs as text, CSV and HTML: `python -m app.cli.report FOLDER`, the folder of a
sweep or any folder of runs.

Results are read from each run's own files, however it was started; sweep.json adds the jobs that
never ran, with the reason.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TextIO

from app.cli.processes.ctrl_c import stop_quietly

if __name__ == "__main__":
    stop_quietly("report")  # before the imports, which take a second

from rich import box
from rich.console import Console
from rich.table import Table

from app.cli.options.messages import readable_errors
from app.cli.processes.output import exit_by, table_width
from app.cli.run_report.page import page
from app.cli.run_report.table import COLUMNS, Report, cells, read_report
from app.errors import ConfigError
from app.own_files import write_whole
from app.programs import command_name, with_names

TEXT, CSV, PAGE = "report.txt", "report.csv", "report.html"


WIDTH = 160  # columns unless the terminal or COLUMNS says otherwise


HELP = """\
== Graphfold: a table of runs ==
Usage:  python -m app.cli.report FOLDER

  FOLDER   folder of a sweep (sweeps/<name>), of several runs (runs) or of one run

Prints the table and writes it into FOLDER as report.txt, report.csv and report.html, one file
that needs no network: with plots, in which runs can be chosen.
Tokens/s and TFLOP/s per rank: median over the second half of a run's steps. Loss: of the last
validation; with *, of the last step."""


def print_table(report: Report, stream: TextIO) -> None:
    """Print the table, as wide as the terminal is or COLUMNS says."""
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
        width=table_width(stream, WIDTH),
        highlight=False,
        markup=False,
        emoji=False,
    ).print(table)


def as_csv(report: Report) -> str:
    """Return the table as CSV: all numbers at full precision, one line per run."""
    text = StringIO()
    measured = ("step", "steps", "tokens", "tokens_per_s", "tokens_per_s_planned", "tflops_per_gpu",
                "memory_peak_gib", "memory_planned_gib", "memory_reserved_gib", "joules_per_token",
                "loss", "val_loss", "reruns")  # fmt: skip
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run", "overrides", "state", "reason", "seconds", *measured))
    for row in report.rows:
        figures_of = [getattr(row.facts, name) for name in measured]
        writer.writerow(
            (row.name, row.label, row.state.value, row.reason, row.seconds, *figures_of)
        )
    return text.getvalue()


def report(folder: Path) -> None:
    """Print the table, and write report.txt, .csv and .html into the folder. Raises ConfigError."""
    found = read_report(folder)
    text = StringIO()
    print_table(found, text)
    contents = {TEXT: text.getvalue(), CSV: as_csv(found), PAGE: page(found)}
    try:
        for name, content in contents.items():
            write_whole(folder / name, content.encode(errors="backslashreplace"))
    except OSError as error:
        raise ConfigError(
            "folder", folder, f"{name} cannot be written: {error.strerror}"
        ) from error
    print_table(found, sys.stdout)
    print(f"written: {', '.join(str(folder / name) for name in contents)}")


def main(arguments: Sequence[str]) -> int:
    """Report on the folder named; return the exit code."""
    if {"--help", "-h"} & set(arguments):
        print(with_names(HELP))
        return 0
    with readable_errors("report", speak=True):
        if len(arguments) != 1 or arguments[0].startswith("-"):
            raise ConfigError(
                "arguments",
                " ".join(arguments),
                "must be exactly one folder",
                advice=f"for example {command_name('report')} sweeps/<name>",
            )
        report(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    exit_by(main)
