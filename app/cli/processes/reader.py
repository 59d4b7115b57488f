"""Programs whose output is read by another one, which may have seen enough, like `head`, or knows
fewer characters.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from app.engine.report.lasting import print_every_character

ENDED = 128 + signal.SIGPIPE  # what shells report of programs that end with their reader


@contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """Within the block, a reader of stdout that has ended ends this program quietly: SystemExit.
    Characters that it does not know are printed as escapes, also after the block.
    """
    print_every_character()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # where Python writes the rest to as it ends
        os.close(nowhere)
        sys.exit(ENDED)
