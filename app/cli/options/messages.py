"""Report a mistake in the configuration as one line, with advice that was tried."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from app.cli.options.arguments import Typed, key_of
from app.cli.options.explained import COMPOSING, explained, is_mistake
from app.cli.options.fixed import Fixed
from app.cli.options.trial import tried
from app.cli.options.unknown import translated, unknown_words
from app.config import Run
from app.errors import ConfigError, Instead, OwnError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """Configuration as asked for on the command line."""

    typed: Typed
    load: Callable[[Typed], Run]  # raises what is wrong with it, or with one in its place
    check_host: Callable[[Run], None] | None = None  # raises ConfigError where a host cannot run it

    def advised(self, error: ConfigError) -> ConfigError:
        """Return the error with the candidates that were tried and work: on this host, else on a
        larger one.
        """
        if error.tried or not error.alternatives:
            return error
        # one line for all names of other programs, each of which would be refused by itself
        wrong = unknown_words(self.typed)
        rest = (each for each in self.typed.overrides if each not in wrong)
        asked = dataclasses.replace(self.typed, overrides=tuple(rest))
        ours = [word for each in wrong for word in translated(each)]
        whole = _of_all(error, wrong, ours) if len(wrong) > 1 and ours else error
        loads = not wrong and error.key != "option"  # as it was typed
        fixed = Fixed.of(asked)

        @cache
        def loaded(words: tuple[str, ...]) -> Run | ConfigError:
            return _caught(lambda: self.load(asked.with_overrides(words)))

        def elsewhere(words: Sequence[str]) -> ConfigError | None:
            found = loaded(tuple(words)) if words or loads else whole
            return found if isinstance(found, ConfigError) else None

        def here(words: Sequence[str]) -> ConfigError | None:
            found = loaded(tuple(words)) if words or loads else whole
            if isinstance(found, ConfigError) or (check := self.check_host) is None:
                return found if isinstance(found, ConfigError) else None
            return _caught(lambda: check(found))

        kept = tried(whole, here, fixed)
        if kept.alternatives:
            return kept
        if self.check_host is not None:
            larger = tried(whole, elsewhere, fixed)
            if larger.tried and larger.alternatives:
                return _for_another_host(larger)
        return kept


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


def _for_another_host(error: ConfigError) -> ConfigError:
    works = (" ".join(error.override(each.candidates[0])) for each in error.alternatives)
    advice = f"works on a host with the GPUs and memory for it: {' or '.join(works)}"
    return ConfigError(error.key, error.value, error.rule, advice=advice, tried=True)


def _caught(call: Callable[[], T]) -> T | ConfigError:
    """Return the result of a call, or the mistake that it raises."""
    try:
        return call()
    except COMPOSING as error:
        if not is_mistake(error):
            raise
        found = explained(error)
        if isinstance(found, ConfigError):
            return found
        return ConfigError("configuration", "", str(found))


@contextmanager
def readable_errors(
    program: str,
    speak: bool,
    when_stopped: str = "stopped",
    asked: Callable[[], Asked] | None = None,
    silent_s: float = 0.0,
) -> Iterator[None]:
    """Turn a mistake in the configuration into one line on stderr (where `speak`) and exit code 2.

    Ctrl-C likewise, 130. `asked` returns what was asked for, with which the line's advice is tried.
    A process that does not speak ends after `silent_s` seconds, and the one that speaks ignores
    SIGTERM meanwhile: launchers send it to all ranks once one has ended.
    """
    try:
        with _interrupts_kept():
            yield
    except COMPOSING as error:
        if not is_mistake(error):
            raise
        found = explained(error)
        speak = speak or isinstance(error, OwnError)
    except KeyboardInterrupt:
        if speak:
            print(f"\n{program}: {when_stopped}", file=sys.stderr)
        sys.exit(130)  # as a shell reports an interrupt
    else:
        return
    try:
        if speak:
            with _deaf_to_launchers():
                if asked is not None and isinstance(found, ConfigError) and found.alternatives:
                    with suppress(ConfigError):  # a second mistake: told when this one is mended
                        found = asked().advised(found)
            print(f"{program}: {found}", file=sys.stderr, flush=True)
        else:
            time.sleep(silent_s)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Re-raise KeyboardInterrupt when a library has turned it into another exception: conditions of
    `threading` complain about a lock that is not held.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            cause = cause.__context__
        raise


@contextmanager
def _deaf_to_launchers() -> Iterator[None]:
    """Ignore SIGTERM within the block."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
