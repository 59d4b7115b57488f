"""How wide tables are."""

from __future__ import annotations

import shutil
import sys
from typing import TextIO

ROWS = 24  # of a terminal; asked for together with its columns, and not used


def table_width(stream: TextIO, usual: int) -> int:
    """Columns of a table: on stdout the variable COLUMNS, else a terminal's own; `usual` otherwise.

    What goes elsewhere, into a file or a text, does not depend on where the program runs.
    """
    return shutil.get_terminal_size((usual, ROWS)).columns if stream is sys.__stdout__ else usual
