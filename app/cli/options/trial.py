"""Try the candidates of an error: only those with which the whole configuration passes are offered
as working, and no other typed key is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.cli.options.arguments import key_of
from app.cli.options.fixed import Fixed
from app.errors import ConfigError, FirstOf, Instead, typed

MOST_TRIED = 8  # candidates of one alternative; composing takes a tenth of a second
MOST_MENDS = 2  # changes beside a candidate
MOST_TRIALS = 24  # of one message

# What is wrong with the configuration once these overrides are in the place of those of the same
# keys; None if it works.
Trial = Callable[[Sequence[str]], ConfigError | None]


def tried(error: ConfigError, trial: Trial, fixed: Fixed | None = None) -> ConfigError:
    """Return the error with those of its candidates that work and change nothing fixed.

    First come candidates that change nothing typed but the key that was refused; then those with
    further changes that mend what it breaks. The number of trials is bounded, so that the words do
    not depend on how fast they are.

    Where the configuration works as it is, something outside of it was refused, such as a file or
    a GPU, and candidates that work too stay guesses.
    """
    if error.tried or not error.alternatives:
        return error
    fault = trial(())
    if fault is not None and not _same(fault, error):
        return error.after_trial(())
    search = _Search(error, _limited(trial), fixed or Fixed())
    if fault is None:
        return error.with_guesses(list(_until_spent(search.single())))
    for found in (search.single(), search.mended()):
        if worked := list(dict.fromkeys(_until_spent(found))):
            return error.after_trial(worked)
    return error.after_trial(())


class _Spent(Exception):
    """Raised when a message has used up its trials."""


def _limited(trial: Trial) -> Trial:
    left = iter(range(MOST_TRIALS))

    def limited(overrides: Sequence[str]) -> ConfigError | None:
        if next(left, None) is None:
            raise _Spent
        return trial(overrides)

    return limited


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
    fixed: Fixed

    @property
    def own(self) -> set[str]:
        """Typed keys that may change: the one that was refused."""
        key = self.error.key.lstrip("+~")
        if key == "override":
            key = key_of(str(self.error.value))
        if key == "option":
            return {key_of(word) for word in self.error.override(self._candidates[0])}
        group = key.partition(".")[0]
        return {key, group} & self.fixed.typed if key in self.fixed.typed else {key}

    @property
    def _candidates(self) -> list[object]:
        return [each for listed in self.error.alternatives for each in listed.candidates]

    def single(self) -> Iterator[object]:
        """Yield the first working candidate of each alternative that keeps what is fixed."""
        yield from self._first(self._keeps)

    def mended(self) -> Iterator[object]:
        """Yield the first candidate that works together with changes that mend what it breaks, such
        as a larger batch.
        """
        yield from self._first_mended(self._keeps)

    def _first_mended(self, allowed: Callable[[Sequence[str]], bool]) -> Iterator[object]:
        for alternative in self.error.alternatives:
            for candidate in self._allowed(alternative, allowed):
                words = self._with_mends(self.error.override(candidate), MOST_MENDS)
                if words:
                    yield Instead(*words)
                    return

    def _with_mends(self, words: tuple[str, ...], left: int) -> tuple[str, ...]:
        """Return the words with others that mend each fault in turn; empty if that fails."""
        fault = self.trial(words)
        if fault is None:
            return words
        for second in _mends(fault, words) if left else ():
            if self._keeps(second) and (found := self._with_mends((*words, *second), left - 1)):
                return found
        return ()

    def _first(self, allowed: Callable[[Sequence[str]], bool]) -> Iterator[object]:
        for alternative in self.error.alternatives:
            for candidate in self._allowed(alternative, allowed):
                if self.trial(self.error.override(candidate)) is None:
                    yield candidate
                    break

    def _allowed(
        self, alternative: FirstOf, allowed: Callable[[Sequence[str]], bool]
    ) -> list[object]:
        found = (each for each in alternative.candidates if allowed(self.error.override(each)))
        return [each for each, _ in zip(found, range(MOST_TRIED), strict=False)]

    def _keeps(self, overrides: Sequence[str]) -> bool:
        return not self._changed(overrides)

    def _changed(self, overrides: Sequence[str]) -> set[str]:
        """Return the fixed names that overrides change."""
        names = {key_of(each) for each in overrides}
        return (names & self.fixed.typed - self.own) | (names & self.fixed.sizes - self._typed_own)

    @property
    def _typed_own(self) -> set[str]:
        return self.own & self.fixed.typed


def _mends(fault: ConfigError, first: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield overrides that may mend a fault, without a second value for a key."""
    for alternative in fault.alternatives:
        second = fault.override(alternative.candidates[0])
        if {key_of(each) for each in second}.isdisjoint(map(key_of, first)):
            yield second


def _same(fault: ConfigError, error: ConfigError) -> bool:
    """Return whether two errors have key, value and rule in common."""
    told = ((each.key, typed(each.value), each.rule) for each in (fault, error))
    return len(set(told)) == 1
