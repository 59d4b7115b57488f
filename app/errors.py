"""The one kind of error a user sees, and the arithmetic of "the nearest that works"."""

from __future__ import annotations

import difflib
import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path


class ConfigError(ValueError):
    """A mistake of the user's: which key, what value, which rule, and the nearest value that works."""

    def __init__(self, key: str, value: object, rule: str, nearest: object = None) -> None:
        self.key, self.value, self.rule, self.nearest = key, value, rule, nearest
        hint = "" if nearest is None else f"; nearest that works: {nearest}"
        super().__init__(f"{key}={_text(value)}: {rule}{hint}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Pickle by arguments, so that one rank can hand its error to the others."""
        return type(self), (self.key, self.value, self.rule, self.nearest)


class OwnError(ConfigError):
    """A mistake that one rank may see alone, which therefore says so itself."""


def warn(text: str) -> None:
    """Say in one line of stderr what has gone wrong while the run goes on."""
    # A terminal may show the live line there.
    lead = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{lead}train.py: {text}", file=sys.stderr, flush=True)


def no_room(error: BaseException) -> bool:
    """Whether something failed because a disk is full or a quota reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Make what the system refuses in a run folder, within the block, a ConfigError."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename  # of a rename: what it would have replaced
        about = f" ({path})" if path not in (None, str(run_dir)) else ""
        rule = f"cannot be used: {error.strerror}{about}"
        hint = "more room" if no_room(error) else "another run_dir"
        raise ConfigError("run_dir", run_dir, rule, hint) from error


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)


def nearest_divisors(value: int, of: int) -> str:
    """The divisors of `of` on both sides of `value`, as text: nearest_divisors(3, 8) == "2 or 4"."""
    divisors = [d for d in range(1, of + 1) if of % d == 0]
    below = [d for d in divisors if d <= value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(map(str, below + above))


def nearest_multiples(value: int, of: int) -> str:
    """The positive multiples of `of` on both sides of `value`, as text: nearest_multiples(10, 4) == "8 or 12"."""
    below = value // of * of
    return " or ".join(str(m) for m in (below, below + of) if m > 0)


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The known word most like `word`, None when nothing is close."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return close[0] if close else None
