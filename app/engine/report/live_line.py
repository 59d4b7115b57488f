"""Live progress line on a terminal: a bar and a text, redrawn in place.

rich draws the bar. Its own live display is not used: it runs a thread, takes over stdout, and
hides the cursor, which a killed program never shows again.
"""

from __future__ import annotations

from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from app.errors import CLEAR, say

BAR = 22  # columns, if the text leaves as many


class LiveLine:
    """Last line of a terminal, redrawn in place."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self.stream = stream
        self.total = total
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)

    def draw(self, completed: int, text: str) -> None:
        """Draw a bar for `completed` of the total and a text, cropped to the terminal's width."""
        room = self._console.width - 1  # a character in the last column would wrap the cursor
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
        """Print a permanent line above the live one."""
        say(line, self.stream)

    def end(self) -> None:
        """Leave the line as it is and move below it."""
        print(file=self.stream)
