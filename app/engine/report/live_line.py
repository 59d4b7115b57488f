"""Live progress line on a terminal: a bar and a text, redrawn in place.

rich draws the bar. Its own live display is not used: it runs a thread, takes over stdout, and
hides the cursor, which a killed program never shows again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from app.errors import CLEAR, say

BAR, SHORTEST_BAR = 22, 10  # columns, if the text leaves as many; at least
GAP = "  "  # between parts of the line


class LiveLine:
    """Last line of a terminal, redrawn in place."""

    def __init__(self, stream: TextIO, total: int, drops: Sequence[str]) -> None:
        """`drops` names the parts of the text that give way in a narrow terminal, first to last."""
        self.stream = stream
        self.total = total
        self.drops = drops
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)

    def draw(self, completed: int, parts: Mapping[str, str]) -> None:
        """Draw a bar for `completed` of the total and the named parts of a text, as many as fit
        into the terminal's width beside the bar; a percentage where no bar fits.
        """
        room = self._console.width - 1  # a character in the last column would wrap the cursor
        text, bar = self._fitting(parts, room)
        line = Table.grid(padding=(0, len(GAP), 0, 0))
        cells: list[RenderableType] = [text]
        if bar >= SHORTEST_BAR:
            line.add_column(width=bar)
            cells.insert(
                0, ProgressBar(total=self.total, completed=completed, finished_style="green")
            )
        else:
            cells = [GAP.join(filter(None, (f"{completed / self.total:.0%}", text)))]
        line.add_column(no_wrap=True, overflow="crop")
        line.add_row(*cells)
        with self._console.capture() as drawn:
            self._console.print(line, width=room)
        print(f"{CLEAR}{drawn.get().rstrip()}", end="", file=self.stream, flush=True)

    def _fitting(self, parts: Mapping[str, str], room: int) -> tuple[str, int]:
        """Return the text of the parts that leave room for a bar, and the bar's columns."""
        kept = dict(parts)
        for name in (None, *self.drops):
            if name is not None:
                kept.pop(name, None)
            text = GAP.join(kept.values())
            bar = room - len(GAP) - cell_len(text)
            if bar >= SHORTEST_BAR:
                break
        return text, min(bar, BAR)

    def keep(self, line: str) -> None:
        """Print a permanent line above the live one."""
        say(line, self.stream)

    def end(self) -> None:
        """Leave the line as it is and move below it."""
        print(file=self.stream)
