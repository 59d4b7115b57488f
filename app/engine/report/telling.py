"""Print the progress of slow work during which nothing else is printed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from app.errors import say

FIRST_S = 1.0  # seconds until the first line
EVERY_S = 10.0  # seconds between further lines


@contextmanager
def telling(
    what: str,
    progress: Callable[[], str] = lambda: "",
    *,
    aloud: bool = True,
    stream: TextIO | None = None,
) -> Iterator[None]:
    """Print, for a slow block, what it does, its `progress()`, and its end; to stdout or `stream`.

    Prints nothing for a block that takes less than FIRST_S, or without `aloud`.
    """
    if not aloud:
        yield
        return
    began = time.monotonic()
    over = threading.Event()
    told = threading.Event()

    def tell() -> None:
        seconds = FIRST_S
        while not over.wait(seconds):
            told.set()
            come = f"{text}, " if (text := progress()) else ""
            say(f"{what}: {come}{_since(began)} so far", stream or sys.stdout)
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
            say(f"{what}: done in {_since(began)}", stream or sys.stdout)


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s"
