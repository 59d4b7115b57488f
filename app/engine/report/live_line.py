"""The line of a terminal that shows how far a run has come: a bar and what is known, redrawn.

rich draws the bar. Its live display would also hide the cursor until the program says otherwise,
which one that is killed does not, run a thread, and take over stdout.
"""

from __future__ import annotations

from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from app.errors import CLEAR, say

BAR = 22  # columns, where the text leaves as many


class LiveLine:
    """The last line of a terminal."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self.stream = stream
        self.total = total
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)

    def draw(self, completed: int, text: str) -> None:
        """Show how many of all are completed, and a text that is cut where the terminal ends."""
        room = self._console.width - 1  # in the last column the cursor would wrap
        line = Table.grid(padding=(0, 2, 0, 0))
        parts: list[RenderableType] = [text]
        if room >= BAR + 2 + cell_len(text):
            line.add_column(width=BAR)
            parts.insert(0, ProgressBar(total=self.total, completed=completed))
        line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*parts)
        with self._console.capture() as drawn:
            self._console.print(line, width=room)
        print(f"{CLEAR}{drawn.get().rstrip()}", end="", file=self.stream, flush=True)

    def keep(self, line: str) -> None:
        """Put a line that stays above it."""
        say(line, self.stream)

    def end(self) -> None:
        """Leave it as it is, and go on below it."""
        print(file=self.stream)
