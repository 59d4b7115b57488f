"""Keep a run alive when stdout or stderr fails: closed pipe or terminal, full disk, encoding."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from app.errors import say
from app.programs import speaker

RAISING = ("strict", "surrogateescape")  # Python's default error handlers of streams


class LastingStream:
    """Wrapper of stdout or stderr that drops all output after the first failed write."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream, or drop the text after a failure."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream, or do nothing after a failure."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Redirect the file descriptor to /dev/null, so that output of libraries is dropped too."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        with suppress(OSError):
            self._stream.flush()
        other = sys.stdout if self._name == "stderr" else sys.stderr
        lost = f"{self._name} cannot be written: {error.strerror}; the run continues without it"
        say(f"{speaker('train')}: {lost}", other)


def print_every_character() -> None:
    """Make stdout and stderr print characters outside their encoding as escapes, like \\u25b6.

    They would raise UnicodeEncodeError otherwise. A stream closed from the start becomes /dev/null.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, _nowhere(number))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in RAISING:
            stream.reconfigure(errors="backslashreplace")


def _nowhere(number: int) -> TextIO:
    """Open /dev/null, and also as file descriptor `number` if that is closed.

    Otherwise the next opened file would get that number, and with it what libraries print.
    """
    stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, stays open
    try:
        os.fstat(number)
    except OSError:
        os.dup2(stream.fileno(), number)
    return stream


@contextmanager
def lasting_output() -> Iterator[None]:
    """Ignore failures to write to stdout or stderr within the block."""
    print_every_character()  # here for jobs of submitit, which do not pass through train.py's main
    before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, LastingStream(sys.stdout, "stdout"))
    sys.stderr = cast(TextIO, LastingStream(sys.stderr, "stderr"))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = before
