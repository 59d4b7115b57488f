"""From an exception while composing to one line that a person can act on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from app.cli.options.explained import COMPOSING, explained, is_mistake
from app.cli.options.trial import Trial, tried
from app.errors import ConfigError, OwnError


@contextmanager
def readable_errors(
    program: str,
    speak: bool,
    when_stopped: str = "stopped",
    trial: Callable[[], Trial] | None = None,
    silent_s: float = 0.0,
) -> Iterator[None]:
    """Turn a mistake in the configuration into one line on stderr (where `speak`) and exit code 2.

    Ctrl-C likewise, 130. `trial` makes a trial of the configuration: what the line advises is
    tried. Who does not speak ends after `silent_s` seconds: launchers end all ranks once one has
    ended, and the one that speaks must not be cut off.
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
            if trial is not None and isinstance(found, ConfigError) and found.alternatives:
                found = tried(found, trial())
            print(f"{program}: {found}", file=sys.stderr, flush=True)
        else:
            time.sleep(silent_s)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Turn what a library has raised while Ctrl-C was on its way out of it into that interrupt:
    conditions of `threading`, for one, complain that they have lost their lock.
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


def trial_of(load: Callable[[Sequence[str]], object]) -> Trial:
    """The trial that loads a configuration with the overrides that it is given."""

    def trial(overrides: Sequence[str]) -> ConfigError | None:
        try:
            load(overrides)
        except COMPOSING as error:
            if not is_mistake(error):
                raise
            found = explained(error)
            if isinstance(found, ConfigError):
                return found
            return ConfigError("configuration", "", str(found))
        return None

    return trial
