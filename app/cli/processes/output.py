"""Output of programs: into a pipe, whose reader may close it early, like `head`, or use an encoding
with fewer characters; and the width of tables.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

from app.engine.report.lasting import print_every_character
from app.version import Version

ENDED = 128 + signal.SIGPIPE  # exit code that shells report for a program ended by a closed pipe


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """End this program quietly (SystemExit) if the reader of stdout closes the pipe within the
    block. Characters outside its encoding are printed as escapes, also after the block.
    """
    print_every_character()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes its buffer once more as it ends
        os.close(nowhere)
        sys.exit(ENDED)


def exit_by(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run this process's command line; SystemExit with the exit code, or if its reader is gone."""
    with ends_with_its_reader():
        code = 0 if tells_version(sys.argv[1:]) else main(sys.argv[1:])
    sys.exit(code)


def tells_version(arguments: Sequence[str]) -> bool:
    """Print the version if the arguments ask for it, and return whether they do."""
    if asked := "--version" in arguments:
        print(f"graphfold {Version.of().short}")
    return asked


def table_width(stream: TextIO, usual: int) -> int:
    """Return the columns of a table: on stdout COLUMNS or the terminal's width, otherwise `usual`.

    Tables written to files or strings do not depend on the terminal.
    """
    return shutil.get_terminal_size((usual, 0)).columns if stream is sys.__stdout__ else usual
