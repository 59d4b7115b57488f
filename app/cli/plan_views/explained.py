"""Printed table of a run's step time beside its plan, by cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console

from app.cli.plan_views.rows import heading, new_table
from app.cli.processes.output import table_width
from app.plan.formatting import count_of, figures, signed_percent
from app.planner.explain import REST, Explained
from app.planner.measured import Measurements, TraceSums

WIDTH = 100  # columns unless the terminal or COLUMNS says otherwise
MUCH = 2.0  # difference over the plan from which the ratio is shown


def print_explained(
    told: Explained,
    found: Measurements,
    notes: Sequence[str],
    *,
    trace: TraceSums | None,
    stream: TextIO,
) -> None:
    """Print planned and measured step, causes that add up to the difference, and notes."""
    width = table_width(stream, WIDTH)
    console = Console(file=stream, width=width, highlight=False, markup=False, emoji=False)
    steps = f"{count_of(found.steps, 'step')}, {found.first} to {found.last}"
    heading(console, "Step", f"mean of {steps}; measured − planned by cause")
    digits = 1 if max(told.planned, told.measured) >= 1000 else 3
    table = new_table("cause", ">ms", "found", "by")
    table.add_row("planned", f"{told.planned:,.{digits}f}", "", "")
    for cause in told.causes:
        ms = "—" if cause.ms is None else f"{cause.ms:+,.{digits}f}"
        if cause.name == REST:
            table.add_section()
        table.add_row(cause.name, ms, cause.how, cause.told)
    table.add_row("measured", f"{told.measured:,.{digits}f}", "", _beside(told.off))
    console.print(table)
    for note in notes:
        console.print(f"note: {note}")
    if trace is not None:
        _print_trace(trace, console)


def _beside(off: float) -> str:
    """Return the difference over the plan: "+23 %", or the ratio where it is large."""
    return signed_percent(off) if off < MUCH else f"{figures(1 + off)} times the plan"


def _print_trace(trace: TraceSums, console: Console) -> None:
    """Print the kernels of the profiled steps, the longest first."""
    console.print()
    heading(console, "Profile", f"ms per step of steps {trace.first} to {trace.last}, rank 0")
    table = new_table("kernels", ">ms")
    for part, ms in sorted(trace.parts.items(), key=lambda item: -item[1]):
        table.add_row(part, f"{ms:,.2f}")
    console.print(table)
