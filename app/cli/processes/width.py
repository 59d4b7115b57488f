"""Width of printed tables."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

ROWS = 24  # get_terminal_size wants a fallback for rows too; unused


def table_width(stream: TextIO, usual: int) -> int:
    """Return the columns of a table: on stdout COLUMNS or the terminal's width, otherwise `usual`.

    Tables written to files or strings do not depend on the terminal.
    """
    return shutil.get_terminal_size((usual, ROWS)).columns if stream is sys.__stdout__ else usual
