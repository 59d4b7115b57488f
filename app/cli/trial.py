"""Trying what a message would advise: only a configuration that passes as a whole is called one that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from app.errors import ConfigError, FirstOf

MOST_TRIED = 8  # candidates of one alternative; composing takes a tenth of a second

# What is wrong with the configuration once these overrides are in the place of those of the same keys; None: nothing.
Trial = Callable[[Sequence[str]], ConfigError | None]


def tried(error: ConfigError, trial: Trial) -> ConfigError:
    """The error with those of its candidates that work.

    A trial that does not meet the error itself proves nothing, and the candidates stay guesses.
    """
    if error.tried or not _same(trial(()), error):
        return error
    return error.after_trial(list(dict.fromkeys(_working(error, trial))))


def _working(error: ConfigError, trial: Trial) -> Iterator[object]:
    for alternative in error.alternatives:
        yield from _first(error, alternative, trial)


def _first(error: ConfigError, alternative: FirstOf, trial: Trial) -> Iterator[object]:
    for candidate in alternative.candidates[:MOST_TRIED]:
        if trial(error.override(candidate)) is None:
            yield candidate
            return


def _same(found: ConfigError | None, error: ConfigError) -> bool:
    return found is not None and str(found) == str(error)
