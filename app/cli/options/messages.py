"""Report a mistake in the configuration as one line, with advice that was tried."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from app.cli.options.advice import Asked
from app.cli.options.explained import COMPOSING, explained, is_mistake
from app.errors import ConfigError, JobFailedError, OwnError
from app.programs import speaker


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
    except JobFailedError:
        sys.exit(1)
    except KeyboardInterrupt:
        if speak:
            print(f"\n{speaker(program)}: {when_stopped}", file=sys.stderr)
        sys.exit(130)  # as a shell reports an interrupt
    else:
        return
    try:
        if speak:
            with _deaf_to_launchers():
                found = _advised(found, asked)
            print(f"{speaker(program)}: {found}", file=sys.stderr, flush=True)
        else:
            time.sleep(silent_s)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


@contextmanager
def mistakes_raised(asked: Callable[[], Asked] | None = None) -> Iterator[None]:
    """Raise a mistake in the configuration as a ConfigError with the line that `readable_errors`
    prints.
    """
    try:
        with _interrupts_kept():
            yield
    except COMPOSING as error:
        if not is_mistake(error):
            raise
        found = _advised(explained(error), asked)
    else:
        return
    raise found if isinstance(found, ConfigError) else ConfigError.of_message(str(found))


def _advised(found: Exception, asked: Callable[[], Asked] | None) -> Exception:
    """Return the error with advice that was tried on what was asked for."""
    if asked is not None and isinstance(found, ConfigError) and found.alternatives:
        with suppress(ConfigError):  # a second mistake: told when this one is mended
            return asked().advised(found)
    return found


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
