"""Building blocks of the plan's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MOST_ROWS = 16  # of a table; of more, only the first and the last half as many


def heading(console: Console, name: str, remark: str = "") -> None:
    """Print the line above a table."""
    console.print(Text.assemble((name, "bold"), (f": {remark}" if remark else "")))


def new_table(*columns: str) -> Table:
    """Return an empty table with these columns; a name that starts with > is right-aligned, for
    numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, header_style="dim")
    for name in columns:
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", no_wrap=right
        )
    return table


def fill(table: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add all rows, or the first and last if there are more than MOST_ROWS."""
    half = MOST_ROWS // 2
    shown = rows
    if len(rows) > MOST_ROWS:
        shown = [*rows[:half], ["…"] * len(table.columns), *rows[-half:]]
    for row in shown:
        table.add_row(*row)


def print_pairs(console: Console, pairs: Iterable[tuple[str, str]]) -> None:
    """Print two columns without headings."""
    grid = Table.grid(padding=(0, 2))
    for pair in pairs:
        grid.add_row(*pair)
    console.print(grid)
