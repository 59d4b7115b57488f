"""Try the candidates of an error: only those with which the whole configuration passes are offered
as working, and nothing else that was typed is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from app.cli.options.arguments import Typed, key_of
from app.cli.options.explained import COMPOSING, explained, is_mistake
from app.cli.options.unknown import translated, unknown_words
from app.cli.processes.home import CONF
from app.config import Run
from app.errors import ConfigError, Instead, typed

MOST_TRIED = 8  # candidates of one alternative; composing takes a tenth of a second
MOST_MENDS = 2  # changes beside a candidate
MOST_TRIALS = 24  # of one message
# Models and experiments whose sizes nobody has published: advice may change them.
TOYS = ("moe_tiny", "dense_tiny", "smoke", "moe_sigmoid_shared")

# What is wrong with the configuration once these overrides are in the place of those of the same
# keys; None if it works.
Trial = Callable[[Sequence[str]], ConfigError | None]


@dataclass(frozen=True, slots=True)
class Asked:
    """Configuration as asked for on the command line."""

    typed: Typed
    load: Callable[[Typed], Run]  # raises what is wrong with it, or with one in its place
    check_host: Callable[[Run], None] | None = None  # raises ConfigError where a host cannot run it

    def advised(self, error: ConfigError) -> ConfigError:
        """Return the error with the candidates that were tried and work on this host."""
        if error.tried or not error.alternatives:
            return error
        # one line for all names of other programs, each of which would be refused by itself
        wrong = unknown_words(self.typed)
        rest = tuple(each for each in self.typed.overrides if each not in wrong)
        asked = dataclasses.replace(self.typed, overrides=rest)
        ours = [word for each in wrong for word in translated(each)]
        whole = _of_all(error, wrong, ours) if len(wrong) > 1 and ours else error
        as_typed = not wrong and error.key != "option"

        @cache
        def trial(words: tuple[str, ...]) -> ConfigError | None:
            if not words and not as_typed:
                return whole
            try:
                run = self.load(asked.with_overrides(words))
                if self.check_host is not None:
                    self.check_host(run)
            except COMPOSING as fault:
                if not is_mistake(fault):
                    raise
                found = explained(fault)
                if isinstance(found, ConfigError):
                    return found
                return ConfigError("configuration", "", str(found))
            return None

        return tried(whole, lambda words: trial(tuple(words)), asked.overrides)


def _of_all(error: ConfigError, wrong: Sequence[str], ours: Sequence[str]) -> ConfigError:
    """Return one error for several names of other programs, with overrides that replace all of
    them. It offers none if two names are one key here, and lists names without a key.
    """
    if len(set(map(key_of, ours))) < len(set(ours)):
        twice = "two of these names are one key here: type one"
        return ConfigError(error.key, error.value, error.rule, advice=twice)
    alone = [key_of(each) for each in wrong if not translated(each)]
    advice = f"there is no key for {', '.join(alone)}" if alone else error.advice
    near = Instead(*dict.fromkeys(ours))
    return ConfigError(error.key, error.value, error.rule, near, guess=error.guess, advice=advice)


def tried(error: ConfigError, trial: Trial, given: Sequence[str] = ()) -> ConfigError:
    """Return the error with those of its candidates that work and leave what is `given`, the typed
    overrides, but for the one that was refused.

    First come candidates that work alone, then those with further changes that mend what they
    break. The number of trials is bounded, so that the words do not depend on how fast they are.

    Where the configuration works as it is, something outside of it was refused, such as a file or
    a GPU, and candidates that work too stay guesses.
    """
    if error.tried or not error.alternatives:
        return error
    fault = trial(())
    if fault is not None and not _same(fault, error):
        return error.after_trial(())
    left = iter(range(MOST_TRIALS))

    def limited(overrides: Sequence[str]) -> ConfigError | None:
        if next(left, None) is None:
            raise _Spent
        return trial(overrides)

    search = _Search(error, limited, given)
    if fault is None:
        return error.with_guesses(list(_until_spent(search.working(mends=0))))
    for mends in (0, MOST_MENDS):
        if worked := list(dict.fromkeys(_until_spent(search.working(mends)))):
            return error.after_trial(worked)
    return error.after_trial(())


class _Spent(Exception):
    """Raised when a message has used up its trials."""


def _until_spent(found: Iterable[object]) -> Iterator[object]:
    try:
        yield from found
    except _Spent:
        return


@dataclass(frozen=True, slots=True)
class _Search:
    """Search for the working candidates of one error."""

    error: ConfigError
    trial: Trial
    given: Sequence[str]  # typed overrides

    def working(self, mends: int) -> Iterator[object]:
        """Yield the first candidate of each alternative that works, with up to so many changes
        beside it.
        """
        for alternative in self.error.alternatives:
            kept = (each for each in alternative.candidates if self._keeps(each))
            for candidate, _ in zip(kept, range(MOST_TRIED), strict=False):
                words = self.error.override(candidate)
                if found := self._mended(words, mends):
                    yield candidate if found == words else Instead(*found)
                    break

    def _keeps(self, candidate: object) -> bool:
        return all(map(self._may_change, self.error.override(candidate)))

    def _mended(self, words: tuple[str, ...], left: int) -> tuple[str, ...]:
        """Return the words with others that mend each fault in turn; empty if that fails."""
        fault = self.trial(words)
        if fault is None:
            return words
        for alternative in fault.alternatives if left else ():
            second = fault.override(alternative.candidates[0])
            again = set(map(key_of, second)) & set(map(key_of, words))
            if again or not all(map(self._may_change, second)):
                continue
            if found := self._mended((*words, *second), left - 1):
                return found
        return ()

    def _may_change(self, override: str) -> bool:
        """Return whether advice may change the key of an override: not one that was typed but was
        not refused, of an option that was typed, or a size of a chosen model.
        """
        key = key_of(override)
        group = key.partition(".")[0]
        names = {key_of(each) for each in self.given}
        if key in names:
            return key in self._refused
        if any(_fixes(each, group) for each in self.given):
            return group != "model" and group in self._refused
        return True

    @property
    def _refused(self) -> set[str]:
        """Keys and groups that the error is about."""
        key = self.error.key.lstrip("+~")
        if key == "override":
            key = key_of(str(self.error.value))
        if key == "option":
            words = self.error.override(self.error.alternatives[0].candidates[0])
            return {key_of(word) for word in words}
        return {key, key.partition(".")[0]}


def _fixes(override: str, group: str) -> bool:
    """Return whether an override chooses the option of a group, or with a model its sizes."""
    name, _, option = override.lstrip("+").partition("=")
    if name == "experiment":
        return group == "model" and option not in TOYS
    return name == group and (CONF / group).is_dir() and option not in TOYS


def _same(fault: ConfigError, error: ConfigError) -> bool:
    """Return whether two errors have key, value and rule in common."""
    told = ((each.key, typed(each.value), each.rule) for each in (fault, error))
    return len(set(told)) == 1
