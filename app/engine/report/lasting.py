"""A run outlives whoever reads it: a pipe whose reader has ended, a terminal that is gone, a disk
that is full behind its log, an encoding that lacks a character.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from app.errors import say

RAISING = ("strict", "surrogateescape")  # what streams do about characters, unless they are told


class LastingStream:
    """stdout or stderr, whose lines are dropped from the first on that cannot be written."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As the stream does, or not at all."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """As above."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Let everything that is still to be written vanish, that of libraries too."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        with suppress(OSError):
            self._stream.flush()
        other = sys.stdout if self._name == "stderr" else sys.stderr
        lost = f"{self._name} cannot be written: {error.strerror}; the run goes on without it"
        say(f"train.py: {lost}", other)


def print_every_character() -> None:
    """Have stdout and stderr print what their encoding lacks as an escape, like \\u25b6, instead of
    raising UnicodeEncodeError; one that is closed from the start swallows everything.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere(number))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in RAISING:
            stream.reconfigure(errors="backslashreplace")


def _nowhere(number: int) -> TextIO:
    """Open /dev/null, also as the file of this number: the next one opened would get what
    libraries print.
    """
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, stays open
    try:
        os.fstat(number)
    except OSError:
        os.dup2(stream.fileno(), number)
    return stream


@contextmanager
def lasting_output() -> Iterator[None]:
    """Within the block nothing ends because stdout or stderr cannot be written."""
    print_every_character()  # submitit's jobs begin here
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, LastingStream(sys.stdout, "stdout"))
    sys.stderr = cast(TextIO, LastingStream(sys.stderr, "stderr"))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before
