"""Print the progress of slow work during which nothing else is printed."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from app.errors import CLEAR, say

FIRST_S = 1.0  # seconds until the first line
EVERY_S = 10.0  # seconds between further lines
REDRAWN_S = 1.0  # seconds between changes of the one line of a terminal


@contextmanager
def telling(
    what: str,
    progress: Callable[[], str] = lambda: "",
    *,
    aloud: bool = True,
    stream: TextIO | None = None,
    ended: str = "done",
) -> Iterator[None]:
    """Print, for a slow block, what it does, its `progress()`, and its end; to stdout or `stream`.

    `ended`: the word for its end. Prints nothing for a block that takes less than FIRST_S, or
    without `aloud`. On a terminal the line is updated in place.
    """
    if not aloud:
        yield
        return
    stream = stream or sys.stdout
    began = time.monotonic()
    over = threading.Event()
    told = threading.Event()

    def come() -> str:
        return f"{text}, " if (text := progress()) else ""

    def tell() -> None:
        seconds = FIRST_S
        while not over.wait(seconds):
            told.set()
            now = f": {come()}{_since(began)} so far"
            if stream.isatty():
                room = (os.get_terminal_size(stream.fileno()).columns or 80) - 1
                line = f"{what[: max(room - len(now), 0)]}{now}"  # progress outlasts the name
                print(f"{CLEAR}{line[:room]}", end="", file=stream, flush=True)
                seconds = REDRAWN_S
            else:
                say(f"{what}{now}", stream)
                seconds = EVERY_S

    thread = threading.Thread(target=tell, daemon=True, name="telling")
    thread.start()
    done = False
    try:
        yield
        done = True
    finally:
        over.set()
        thread.join()
        if done and told.is_set():
            say(f"{what}: {come()}{ended} in {_since(began)}", stream)
        elif told.is_set() and stream.isatty():
            print(file=stream)  # what went wrong is said below the line


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"
