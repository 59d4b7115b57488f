"""Searches of Optuna, checked before their first trial (docs/sweeps.md)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig

from app.cli.options.arguments import is_share
from app.cli.run_report.sweep_record import RECORD
from app.cli.sweeps.combinations import compose_with, judged, of_all_values, shares_in
from app.cli.sweeps.sweep import told_to_end_is_ctrl_c
from app.errors import ConfigError, JobFailedError, warn
from app.programs import page

SWEEPER = "hydra.sweeper"
EXAMPLE = "'optim.lr=tag(log,interval(3e-4,1e-2))'"
OLDER = "in an environment without MLflow type pip install 'sqlalchemy<2' 'alembic<1.13'"
INSIDE = 1e-6  # of an interval, from its end to a value that stands for those inside
NO_LOSS = "No trials are completed"  # beginning of Optuna's error


def check_search(config: DictConfig, loader: ConfigLoader) -> None:
    """Raise ConfigError for a search that cannot begin, or whose trials could not.

    1. Its numbers: at least one trial, of which a share from 0 to 1 may fail.
    2. The folder is new, unless the study is a stored one that continues.
    3. The overrides: one searches at least, and trials at the ends of their ranges compose; one of
       them passes all checks, and no end of an interval fails by itself.
    4. The study can be stored.
    """
    asked = config.hydra.sweeper
    for key in ("n_trials", "n_jobs"):
        if asked[key] < 1:
            raise ConfigError(f"{SWEEPER}.{key}", asked[key], "must be at least 1")
    if not 0 <= (rate := asked.max_failure_rate) <= 1:
        raise ConfigError(f"{SWEEPER}.max_failure_rate", rate, "must be from 0 to 1")
    typed = [*(f"{key}={value}" for key, value in (asked.params or {}).items())]
    typed += config.hydra.overrides.task
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(typed)
    searched = any(each.is_sweep_override() for each in overrides)
    if not (searched or asked.search_space or asked.custom_search_space):
        rule = "has nothing to search, as no key has several values"
        raise ConfigError("hydra/sweeper", "optuna", rule, advice=f"type {EXAMPLE} or the like")
    _check_folder(
        Path(config.hydra.sweep.dir), continues=None not in (asked.storage, asked.study_name)
    )
    _check_trials(overrides, config, loader)
    if asked.storage is not None:
        _check_storage(asked.storage)


def _check_trials(overrides: Sequence[Override], config: DictConfig, loader: ConfigLoader) -> None:
    shares = list(shares_in(overrides))
    compose = partial(compose_with, lambda chosen: loader.load_sweep_config(config, chosen), shares)
    chosen = {
        each.get_key_element(): each for each in overrides if not is_share(str(each.input_line))
    }
    values = {key: list(_ends(each)) for key, each in chosen.items()}
    usual = {key: words[0] for key, words in values.items()}

    @cache
    def reason(trial: tuple[str, ...]) -> str | None:
        try:
            return judged(trial, compose, None)[2]
        except ConfigError as error:
            raise of_all_values(error, overrides) from error

    trials = dict.fromkeys(
        tuple({**usual, key: word}.values()) for key, words in values.items() for word in words
    )
    reasons = [reason(trial) for trial in trials]
    if reasons and None not in reasons:
        raise ConfigError.of_message(str(reasons[0]))
    passing = [trial for trial in trials if reason(trial) is None]
    for place, each in enumerate(chosen.values()):
        for words in _interval_ends(each):
            _check_end(each.key_or_group, words, place, passing=passing, reason=reason)


def _check_end(
    key: str,
    words: tuple[str, ...],
    place: int,
    passing: Sequence[tuple[str, ...]],
    reason: Callable[[tuple[str, ...]], str | None],
) -> None:
    """Raise ConfigError for an end of `key` that fails by a rule of this key, whichever values the
    others have in the trials that pass. `words` are the end and what may pass in its place.
    """
    trials = [(*each[:place], word, *each[place + 1 :]) for word in words for each in passing]
    # An error of another key, as of optim.min_lr above an end of optim.lr: that key may mend it.
    if all((reason(each) or "").startswith(f"{key}=") for each in trials):
        raise ConfigError.of_message(str(reason(trials[0])))


def _interval_ends(override: Override) -> Iterator[tuple[str, ...]]:
    """Yield each end of an interval as an override. An end of fractions is followed by a value just
    inside, as ends are hardly ever drawn: optim.lr=interval(0,1e-2) works.
    """
    value, key = override.value(), override.get_key_element()
    if not isinstance(value, IntervalSweep):
        return
    assert value.start is not None and value.end is not None
    for end, other in ((value.start, value.end), (value.end, value.start)):
        inside = [end + INSIDE * (other - end)] if isinstance(end, float) else []
        yield tuple(f"{key}={each}" for each in (end, *inside))


def _ends(override: Override) -> Iterator[str]:
    """Yield the overrides of a trial at the ends of what an override lets it choose: all values of
    a list. Raises ConfigError for what Optuna cannot choose from.
    """
    key, value = override.get_key_element(), override.value()
    if not override.is_sweep_override():
        yield str(override.input_line)
    elif isinstance(value, IntervalSweep):
        text = str(override.input_line).partition("=")[2]
        assert value.start is not None and value.end is not None
        if value.start > value.end:
            raise ConfigError(key, text, "begins above its end", advice="exchange the two")
        if "log" in value.tags and value.start <= 0:
            raise ConfigError(key, text, "log needs ends above 0", advice="raise the first")
        yield from (f"{key}={value.start}", f"{key}={value.end}")
    elif isinstance(value, RangeSweep):
        words = [f"{key}={each}" for each in override.sweep_string_iterator()]
        yield from dict.fromkeys((words[0], words[-1]))
    elif isinstance(value, ChoiceSweep):
        yield from (f"{key}={each}" for each in override.sweep_string_iterator())
    else:
        text = str(override.input_line).partition("=")[2]
        rule = "is for hydra/sweeper=grid"
        raise ConfigError(key, text, rule, advice=f"list the values like {key}=1,2,3")


def _check_folder(folder: Path, continues: bool) -> None:
    searched = (folder / RECORD).exists()
    if folder.is_dir() and any(folder.iterdir()) and not (continues and searched):
        rule = "contains another search" if searched else "has files but no sweep"
        more = f"; searches continue with {SWEEPER}.storage and study_name ({page('sweeps.md')})"
        advice = "choose a new folder" + more * searched
        raise ConfigError("hydra.sweep.dir", folder, rule, advice=advice)


def _check_storage(url: Any) -> None:
    if not isinstance(url, str) or url.startswith("redis"):
        return
    if (found := version("sqlalchemy")).partition(".")[0] not in ("0", "1"):
        rule = f"Optuna 2 stores no study with SQLAlchemy {found}"
        raise ConfigError(f"{SWEEPER}.storage", url, rule, advice=OLDER)
    from optuna.storages import get_storage

    try:
        get_storage(url)
    except Exception as error:  # of SQLAlchemy or a driver: any
        rule = f"cannot be used: {(str(error).splitlines() or [type(error).__name__])[0]}"
        raise ConfigError(f"{SWEEPER}.storage", url, rule, advice="choose another") from error


@contextmanager
def searching(may_fail: float) -> Iterator[None]:
    """Within the context a search ends with one line: SystemExit with 1 if more trials failed than
    `may_fail` of those side by side, or none has a loss; signals end it like Ctrl-C.
    """
    # It would say once more what the lines of jobs say.
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").addHandler(logging.NullHandler())
    try:
        with told_to_end_is_ctrl_c():
            yield
    except JobFailedError:
        warn(f"the search ends: {SWEEPER}.max_failure_rate={may_fail:g} allows no more failures")
        sys.exit(1)
    except ValueError as error:
        if not str(error).startswith(NO_LOSS):
            raise
        warn("the search ends: no trial has a validation loss")
        sys.exit(1)
