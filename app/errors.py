"""The one kind of error that a user sees, and the values that it suggests instead."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from math import isqrt
from pathlib import Path
from typing import TextIO

from app.programs import speaker

GRAMMAR = frozenset("|()*'\"\\{}=")  # characters that Hydra's grammar does not read as text
MOST_DIVISOR = 1 << 20  # of candidate divisors: bounds the search for large numbers
# characters that would break a message into several lines
BREAKS = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]")
CLEAR = "\r\x1b[K"  # clears a line of a terminal
LETTERS_PER_SLIP = 4  # letters of a word per tolerated slip
MOST_SLIPS = 3
LEAST_PREFIX = 3  # letters at least in an abbreviation of a longer word


@dataclass(frozen=True)
class Instead:
    """Overrides that together may replace the given value, as typed on the command line."""

    overrides: tuple[str, ...]

    def __init__(self, *overrides: str) -> None:
        object.__setattr__(self, "overrides", overrides)

    def __str__(self) -> str:
        return " ".join(self.overrides)


@dataclass(frozen=True)
class FirstOf:
    """Candidate values or `Instead`s, nearest first; the first one that works is suggested."""

    candidates: tuple[object, ...]

    def __init__(self, candidates: Iterable[object]) -> None:
        object.__setattr__(self, "candidates", tuple(candidates))


class ConfigError(ValueError):
    """A user's mistake: the key, its value, the rule it breaks, and what may work instead.

    nearest: a value of the key, `Instead`, `FirstOf`, or a tuple of such alternatives. They are
    shown as guesses until `app.cli.options.advice` has tried them. guess: the word that the user
    may have meant. advice: an imperative, for mistakes that no other value mends. tried: `nearest`
    has been found to work.
    """

    def __init__(
        self,
        key: str,
        value: object,
        rule: str,
        nearest: object = None,
        *,
        guess: str | None = None,
        advice: str | None = None,
        tried: bool = False,
    ) -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.nearest = nearest
        self.guess = guess
        self.advice = advice
        self.tried = tried
        told = f"{key}={typed(value)}: {rule}{self._hint()}"
        super().__init__(BREAKS.sub(lambda found: repr(found[0])[1:-1], told))

    @classmethod
    def of_message(cls, message: str) -> ConfigError:
        """Return the error with this message, as a program has printed it."""
        key, _, rest = message.partition("=")
        value, colon, rule = rest.partition(": ")
        error = cls(key, value, rule) if colon else cls("configuration", "", message)
        error.args = (message,)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by arguments, so that one rank can send its error to the others."""
        build = partial(type(self), guess=self.guess, advice=self.advice, tried=self.tried)
        return build, (self.key, self.value, self.rule, self.nearest)

    @property
    def alternatives(self) -> tuple[FirstOf, ...]:
        """Alternatives to the value, each with its candidates."""
        if self.nearest is None:
            return ()
        listed = self.nearest if isinstance(self.nearest, tuple) else (self.nearest,)
        found = (each if isinstance(each, FirstOf) else FirstOf([each]) for each in listed)
        return tuple(each for each in found if each.candidates)

    def override(self, candidate: object) -> tuple[str, ...]:
        """Return a candidate as overrides typed on the command line."""
        if isinstance(candidate, Instead):
            return candidate.overrides
        text = typed(candidate)
        return (f"{self.key}='{text}'" if GRAMMAR & set(text) else f"{self.key}={text}",)

    def after_trial(self, worked: Sequence[object]) -> ConfigError:
        """Return this error with the candidates that were found to work."""
        return self._with(tuple(worked) or None, tried=True)

    def with_guesses(self, candidates: Sequence[object]) -> ConfigError:
        """Return this error with other, untried candidates."""
        return self._with(tuple(candidates) or None, tried=False)

    def _with(self, nearest: object, tried: bool) -> ConfigError:
        words = {"guess": self.guess, "advice": self.advice}
        return type(self)(self.key, self.value, self.rule, nearest, **words, tried=tried)

    def _hint(self) -> str:
        words = [typed(each.candidates[0]) for each in self.alternatives]
        works = words if self.tried else []
        guesses = ([] if self.tried else words) + ([self.guess] if self.guess else [])
        told = f"; nearest that works: {' or '.join(works)}" if works else ""
        asked = f"; did you mean {' or '.join(guesses)}?" if guesses else ""
        return told + asked + (f"; {self.advice}" if self.advice else "")


class OwnError(ConfigError):
    """A mistake that only one rank may see, so that rank reports it itself."""


class JobFailedError(Exception):
    """A job of a sweep has failed, and a line of its own told why."""


def typed(value: object) -> str:
    """Return a value as typed on the command line."""
    match value:
        case Enum():
            return str(value.value)
        case tuple() | list():
            return f"[{', '.join(map(typed, value))}]"
        case bool() | None:
            return {True: "true", False: "false", None: "null"}[value]
        case _:
            return str(value)


def say(line: str, stream: TextIO) -> None:
    """Print a line that stays, in place of the run's live line if `stream` is a terminal."""
    lead = CLEAR if stream.isatty() else ""
    print(f"{lead}{line}", file=stream, flush=True)


def warn(text: str, program: str = "train") -> None:
    """Print a one-line warning of a program to stderr; it continues."""
    say(f"{speaker(program)}: {text}", sys.stderr)


def no_room(error: BaseException) -> bool:
    """Return whether an operation failed because a disk is full or a quota reached."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Turn an OSError within the block into a ConfigError about `run_dir`."""
    try:
        yield
    except OSError as error:
        path = error.filename2 or error.filename  # of a rename: its target
        about = f" ({path})" if path not in (None, str(run_dir)) else ""
        rule = f"cannot be used: {error.strerror}{about}"
        advice = "make room there" if no_room(error) else "choose another run_dir"
        raise ConfigError("run_dir", run_dir, rule, advice=advice) from error


def nearest_divisors(value: int, of: int, key: str | None = None) -> tuple[FirstOf, ...]:
    """Return the divisors of `of` below and above `value`, nearest first.

    `key` names another key to set to them.
    """
    divisors = _divisors(of)
    below = [d for d in reversed(divisors) if d <= value]
    return _of_key(key, below, [d for d in divisors if d > value])


def nearest_multiples(value: int, of: int, key: str | None = None) -> tuple[FirstOf, ...]:
    """Return the positive multiples of `of` around `value`.

    `key` names another key to set to them.
    """
    below = value // of * of
    return _of_key(key, [below] if below > 0 else [], [below + of])


def _of_key(key: str | None, *sides: Sequence[int]) -> tuple[FirstOf, ...]:
    if key is None:
        return tuple(FirstOf(side) for side in sides if side)
    return tuple(FirstOf(Instead(f"{key}={n}") for n in side) for side in sides if side)


def _divisors(of: int) -> list[int]:
    small = [d for d in range(1, min(isqrt(of), MOST_DIVISOR) + 1) if of % d == 0]
    return sorted({*small, *(of // d for d in small)})


def nearest(word: str, known: Sequence[str]) -> str | None:
    """Return the known word that `word` misspells or abbreviates; None if none is near."""
    if near := near_names(word, known):
        return near[0]
    begun = letters(word)
    longer = [each for each in known if letters(each).startswith(begun)]
    shortest = min(longer, key=len, default="")
    all_begin = all(letters(each).startswith(letters(shortest)) for each in longer)
    if longer and len(begun) >= LEAST_PREFIX and all_begin:
        return shortest
    first = re.split(r"[^\w-]", word)[0]  # "cuda" of "cuda:0"
    return first if first in known else None


def near_names(word: str, known: Sequence[str]) -> list[str]:
    """Return the known words nearest to `word`.

    Words with the same letters, or the same parts in another order, come first; otherwise those
    with the fewest slips, if these are few for the word's length.
    """
    if same := [each for each in known if letters(each) == letters(word)]:
        return same
    parts = sorted(re.split("[-_.]", word.lower()))
    if reordered := [each for each in known if sorted(re.split("[-_.]", each.lower())) == parts]:
        return reordered
    slips = {each: _slips(word.lower(), each.lower()) for each in known}
    least = min(slips.values(), default=0)
    return [
        each
        for each, count in slips.items()
        if count == least and count <= _most_slips(word.lower(), each.lower())
    ]


def _most_slips(word: str, other: str) -> int:
    """Return how many slips still leave two words near.

    One in five letters, or one omitted letter of four. So a100 and h100 are not near.
    """
    shorter, longer = sorted((word, other), key=len)
    rest = iter(longer)
    left_out = len(longer) >= LETTERS_PER_SLIP and all(letter in rest for letter in shorter)
    return min(MOST_SLIPS, max(int(left_out), (len(longer) - 1) // LETTERS_PER_SLIP))


def letters(word: str) -> str:
    """Return a word in lower case without separators."""
    return re.sub("[-_./ ]", "", word.casefold())


def _slips(word: str, other: str) -> int:
    """Return the edit distance of two words (optimal string alignment).

    It counts omitted, added, mistaken and swapped neighbouring letters.
    """
    before, row = list[int](), list(range(len(other) + 1))
    for place, letter in enumerate(word, 1):
        before, last, row = row, before, [place]
        for there, meant in enumerate(other, 1):
            cost = min(row[-1] + 1, before[there] + 1, before[there - 1] + (letter != meant))
            swapped = place > 1 and there > 1 and letter == other[there - 2]
            if swapped and word[place - 2] == meant:
                cost = min(cost, last[there - 2] + 1)
            row.append(cost)
    return row[-1]


def nearest_model(word: str, known: Sequence[str]) -> str | None:
    """Return the nearest model name, as `nearest` does.

    Names whose digits or number of words differ are other sizes, versions or kinds, not slips.
    """

    def kind(name: str) -> tuple[str, int]:
        return "".join(filter(str.isdigit, name)), len(re.split("[-_]", name))

    return nearest(word, [name for name in known if kind(name) == kind(word)])


# exit code 65: non-finite numbers, which a restart would only repeat
DIVERGED = os.EX_DATAERR


# exit code 71: a rank computes other bits than it should; on other hardware the run continues
CORRUPTED = os.EX_OSERR


# of ranks whose node leaves a run because of corrupt data; torchrun ends it with CORRUPTED
LEAVES = os.EX_OSFILE


class Diverged(Exception):
    """End of training for a reason of its own, as non-finite numbers; the text names the step."""

    code = DIVERGED


class Corrupted(Diverged):
    """End of training because of corrupt data; `ranks` computed or hold it, or may."""

    code = CORRUPTED

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        super().__init__(text)
