"""Trying what a message would advise: only a configuration that passes as a whole is called one
that works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from app.cli.options.arguments import key_of
from app.errors import ConfigError, FirstOf, Instead

MOST_TRIED = 8  # candidates of one alternative; composing takes a tenth of a second
# seconds after which no further candidate is tried: launchers soon end a rank that says nothing
TRYING_S = 5.0

# What is wrong with the configuration once these overrides are in the place of those of the same
# keys; None: nothing.
Trial = Callable[[Sequence[str]], ConfigError | None]


def tried(error: ConfigError, trial: Trial) -> ConfigError:
    """The error with those of its candidates that work.

    A trial that does not meet the error itself proves nothing, and the candidates stay guesses; so
    do they when time is up.
    """
    if error.tried:
        return error
    end = time.monotonic() + TRYING_S

    def timely(overrides: Sequence[str]) -> ConfigError | None:
        if time.monotonic() > end:
            raise TimeoutError
        return trial(overrides)

    try:
        if not _same(timely(()), error):
            return error
        found = list(dict.fromkeys(_working(error, timely)))
        return error.after_trial(found or list(islice(_in_pairs(error, timely), 1)))
    except TimeoutError:
        return error


def _working(error: ConfigError, trial: Trial) -> Iterator[object]:
    for alternative in error.alternatives:
        yield from _first(error, alternative, trial)


def _in_pairs(error: ConfigError, trial: Trial) -> Iterator[Instead]:
    """Candidates that work once what they break is mended as well, as by a larger batch."""
    for alternative in error.alternatives:
        first = error.override(alternative.candidates[0])
        fault = trial(first)
        if fault is None:
            continue
        for other in fault.alternatives:
            second = fault.override(other.candidates[0])
            apart = {key_of(each) for each in second}.isdisjoint(map(key_of, first))
            if apart and trial((*first, *second)) is None:
                yield Instead(*first, *second)


def _first(error: ConfigError, alternative: FirstOf, trial: Trial) -> Iterator[object]:
    for candidate in alternative.candidates[:MOST_TRIED]:
        if trial(error.override(candidate)) is None:
            yield candidate
            return


def _same(found: ConfigError | None, error: ConfigError) -> bool:
    return found is not None and str(found) == str(error)
