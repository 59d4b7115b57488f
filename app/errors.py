"""The one kind of error a user sees, and the arithmetic of what may work instead."""

from __future__ import annotations

import errno
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

GRAMMAR = frozenset("|()*'\"\\{}=")  # what Hydra takes for more than text
MOST_DIVISOR = 1 << 20  # that is looked for
BREAKS = re.compile("[\x00-\x1f\x7f\x85\u2028\u2029]")  # what would make several lines of one
CLEAR = "\r\x1b[K"  # empties the line of a terminal
LETTERS_PER_SLIP = 4  # of a word that may have one slip more
MOST_SLIPS = 3
LEAST_PREFIX = 3  # letters of a word that may be short for a longer one


@dataclass(frozen=True)
class Instead:
    """Overrides that may work together in place of what was given, as one types them."""

    overrides: tuple[str, ...]

    def __init__(self, *overrides: str) -> None:
        object.__setattr__(self, "overrides", overrides)

    def __str__(self) -> str:
        return " ".join(self.overrides)


@dataclass(frozen=True)
class FirstOf:
    """Values or `Instead`s of which the first one that works is enough; the nearest comes first."""

    candidates: tuple[object, ...]

    def __init__(self, candidates: Iterable[object]) -> None:
        object.__setattr__(self, "candidates", tuple(candidates))


class ConfigError(ValueError):
    """A mistake of the user's: which key, what value, which rule, and what may work instead.

    nearest: a value of the key, `Instead`, `FirstOf`, or a tuple of such alternatives. Until
    somebody has tried them (app.cli.options.trial) they are guesses, and told as such.
    guess: the word that this one may be a slip of. advice: what to do where no value helps, as an
    imperative.
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
        shown = BREAKS.sub(lambda found: repr(found[0])[1:-1], typed(value))
        super().__init__(f"{key}={shown}: {rule}{self._hint()}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by arguments, so that one rank can hand its error to the others."""
        build = partial(type(self), guess=self.guess, advice=self.advice, tried=self.tried)
        return build, (self.key, self.value, self.rule, self.nearest)

    @property
    def alternatives(self) -> tuple[FirstOf, ...]:
        """What may work instead, each with its candidates."""
        if self.nearest is None:
            return ()
        listed = self.nearest if isinstance(self.nearest, tuple) else (self.nearest,)
        found = (each if isinstance(each, FirstOf) else FirstOf([each]) for each in listed)
        return tuple(each for each in found if each.candidates)

    def override(self, candidate: object) -> tuple[str, ...]:
        """A candidate as one types it on the command line."""
        if isinstance(candidate, Instead):
            return candidate.overrides
        text = typed(candidate)
        return (f"{self.key}='{text}'" if GRAMMAR & set(text) else f"{self.key}={text}",)

    def after_trial(self, worked: Sequence[object]) -> ConfigError:
        """The same mistake with those candidates that have been found to work."""
        return self._with(tuple(worked) or None, tried=True)

    def with_guesses(self, candidates: Sequence[object]) -> ConfigError:
        """The same mistake with other candidates, which nobody has found to work."""
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
    """A mistake that one rank may see alone, which therefore says so itself."""


def typed(value: object) -> str:
    """A value as the command line takes it."""
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
    """Print a line that stays; a terminal may show the run's live line there, which gives way."""
    lead = CLEAR if stream.isatty() else ""
    print(f"{lead}{line}", file=stream, flush=True)


def warn(text: str, program: str = "train.py") -> None:
    """Say in one line of stderr what has gone wrong while the program goes on."""
    say(f"{program}: {text}", sys.stderr)


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
        advice = "make room there" if no_room(error) else "choose another run_dir"
        raise ConfigError("run_dir", run_dir, rule, advice=advice) from error


def nearest_divisors(value: int, of: int, key: str | None = None) -> tuple[FirstOf, ...]:
    """The divisors of `of` below and above `value`, nearest first; of another `key` where given."""
    divisors = _divisors(of)
    below = [d for d in reversed(divisors) if d <= value]
    return _of_key(key, below, [d for d in divisors if d > value])


def nearest_multiples(value: int, of: int, key: str | None = None) -> tuple[FirstOf, ...]:
    """The positive multiples of `of` around `value`, nearest first; of another `key` where
    given.
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
    """The known word that `word` may be a slip of, or alone is short for; None when nothing is
    near.
    """
    if near := near_names(word, known):
        return near[0]
    begun = letters(word)
    longer = [each for each in known if letters(each).startswith(begun)]
    if len(begun) >= LEAST_PREFIX and len(longer) == 1:
        return longer[0]
    first = re.split(r"[^\w-]", word)[0]  # cuda of cuda:0
    return first if first in known else None


def near_names(word: str, known: Sequence[str]) -> list[str]:
    """The known words with the letters of `word` or its parts in another order, else those with
    the fewest slips, as long as these are few beside the letters.
    """
    if same := [each for each in known if letters(each) == letters(word)]:
        return same
    parts = sorted(re.split("[-_.]", word.lower()))
    if turned := [each for each in known if sorted(re.split("[-_.]", each.lower())) == parts]:
        return turned
    slips = {each: _slips(word.lower(), each.lower()) for each in known}
    least = min(slips.values(), default=0)
    return [
        each
        for each, count in slips.items()
        if count == least and count <= _most_slips(word.lower(), each.lower())
    ]


def _most_slips(word: str, other: str) -> int:
    """Slips that still leave two words near: one in five letters, or a letter left out of four,
    which a100 and h100 are not.
    """
    shorter, longer = sorted((word, other), key=len)
    rest = iter(longer)
    left_out = len(longer) >= LETTERS_PER_SLIP and all(letter in rest for letter in shorter)
    return min(MOST_SLIPS, max(int(left_out), (len(longer) - 1) // LETTERS_PER_SLIP))


def letters(word: str) -> str:
    """A word without case, and without what joins its parts."""
    return re.sub("[-_./ ]", "", word.casefold())


def _slips(word: str, other: str) -> int:
    """Letters that were left out, added, or mistaken, and neighbours that changed places (optimal
    string alignment).
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
    """As `nearest`, for names of models: one that differs in its numbers, or has more or fewer
    words, is another size, version or kind, and no slip.
    """

    def kind(name: str) -> tuple[str, int]:
        return "".join(filter(str.isdigit, name)), len(re.split("[-_]", name))

    return nearest(word, [name for name in known if kind(name) == kind(word)])
