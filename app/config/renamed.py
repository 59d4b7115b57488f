"""Keys and values of earlier versions: CHANGED is the record, one entry per change.

Whatever reads a configuration by name applies it: typed overrides and YAML files
(`app.cli.options.old_names`), saved settings of runs and manifests of checkpoints
(`with_new_names`). So configurations, checkpoints and scripts of earlier versions keep working.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.errors import ConfigError, typed

ABSENT = object()


@dataclass(frozen=True, slots=True)
class Renamed:
    """A key, or a section with all its keys, that has another name now."""

    old: str  # dotted
    new: str


@dataclass(frozen=True, slots=True)
class RenamedValue:
    """A value of a key, by its present name, that is spelt otherwise now."""

    key: str
    old: str
    new: str | float | None


@dataclass(frozen=True, slots=True)
class Removed:
    """A key that is gone. Typed or in a file of the user's it is an error, unless it has the value
    that is now a constant. Saved by a run it is left out, or refused as `instead` says.
    """

    key: str  # by its last name
    now: str  # what happens in its place
    idle: Any = None  # value that is now a constant, so that it does nothing
    # Key that decides in its place: a run that has saved another value continues only if that key
    # is typed. None: results do not depend on the removed key.
    instead: str | None = None

    def idles(self, value: Any) -> bool:
        """Return whether a value, as typed or saved, is the one that is now a constant."""
        text = _text(value)
        if isinstance(self.idle, float):
            with suppress(ValueError):
                return float(text) == self.idle
        return text == _text(self.idle)

    def refused(self, value: Any, key: str | None = None) -> ConfigError:
        """Return the error for a value that had an effect; `key` is its name as typed."""
        advice = None if self.instead is None else f"type {self.instead}=…"
        rule = f"was removed: {self.now}"
        return ConfigError(key or self.key, value, rule, advice=advice)


Change = Renamed | RenamedValue | Removed

# Oldest first: a later line sees the names that the earlier ones have given.
CHANGED: tuple[Change, ...] = (
    Renamed("model.moe.static.stash", "model.moe.static.paged_buffer"),
    Renamed("hardware.profile.product_tflops", "hardware.profile.gemm_tflops"),
    Renamed("hardware.profile.product_memory", "hardware.profile.gemm_memory"),
    RenamedValue("model.moe.echo.algorithm", "exact", "target_search"),
    Removed(
        "optim.pair_expert_grads", "each microbatch's gradient is added as it arrives", idle=False
    ),
    Removed("model.moe.static.multiple", "experts' rows are not padded", idle=1),
    Removed("precision.fp8.count_entries", "lost entries are not counted", idle=False),
    Removed(
        "optim.warmup_samples",
        "warm-up is given in steps, samples / train.global_batch",
        instead="optim.warmup_steps",
    ),
    Removed(
        "optim.decay_samples",
        "decay is given in steps, samples / train.global_batch",
        instead="optim.decay_steps",
    ),
    Removed(
        "optim.wsd_decay_samples",
        "the final decay is given in steps, samples / train.global_batch",
        instead="optim.wsd_decay_steps",
    ),
    Removed("optim.init_lr", "warm-up begins at 0", 0.0, instead="optim.warmup_steps"),
    Removed(
        "optim.weight_decay_end",
        "weight decay is constant",
        instead="optim.weight_decay",
    ),
    Removed("optim.weight_decay_ramp", "weight decay is constant", "constant"),
    Removed("optim.count_zeros", "zero gradients are not counted", False),
    Removed("log.job_type", "the job type is train"),
    Renamed("model.scale_embedding", "model.embedding_scale"),
    RenamedValue("model.embedding_scale", "true", 0.0),
    RenamedValue("model.embedding_scale", "false", None),
)


def new_key(key: str) -> str:
    """Return the present name of a dotted key, which is the key itself unless it was renamed."""
    for change in CHANGED:
        if isinstance(change, Renamed) and f"{key}.".startswith(f"{change.old}."):
            key = change.new + key[len(change.old) :]
    return key


def removed(key: str) -> Removed | None:
    """Return the record of a removed key, None for any other one."""
    return next((each for each in CHANGED if isinstance(each, Removed) and each.key == key), None)


def with_new_names(
    values: Mapping[Any, Any],
    section: str = "",
    *,
    saved: bool,
    typed_keys: Collection[str] | None = None,
) -> tuple[dict[Any, Any], list[str]]:
    """Return nested settings by their present names, and a line per change.

    `section` is the dotted name of what they are settings of, empty for a whole configuration.
    `saved`: a run has written them, so that removed keys are left out.
    `typed_keys`: the run continues with the saved settings and these keys, so that removed keys
    that had an effect are refused unless the key that decides in their place is typed.
    Raises ConfigError for an old and a new name of one key, and for removed keys.
    """
    found: dict[Any, Any] = copy.deepcopy(dict(values))
    told = list[str]()
    for change in CHANGED:
        if path := _path(_key_of(change), section):
            match change:
                case Renamed():
                    told += _rename(found, path, change, section)
                case RenamedValue():
                    told += _replace(found, path, change)
                case Removed():
                    told += _remove(found, path, change, saved=saved, typed_keys=typed_keys)
    return found, told


def _key_of(change: Change) -> str:
    return change.old if isinstance(change, Renamed) else change.key


def _path(key: str, section: str) -> list[str]:
    """Return the names that lead from a section to a key, none where it lies elsewhere."""
    if not section:
        return key.split(".")
    return key[len(section) + 1 :].split(".") if key.startswith(f"{section}.") else []


def _rename(
    values: dict[Any, Any], path: list[str], change: Renamed, section: str
) -> Iterator[str]:
    value = _take(values, path)
    if value is ABSENT:
        return
    if not (target := _path(change.new, section)):
        raise ConfigError(change.old, value, f"is {change.new} now", advice="give it there")
    _put(values, target, value, change)
    yield f"{change.old} is now {change.new}"


def _replace(values: dict[Any, Any], path: list[str], change: RenamedValue) -> Iterator[str]:
    above = _section(values, path[:-1])
    value = ABSENT if above is None else above.get(path[-1], ABSENT)
    listed = value if isinstance(value, list) else [value]
    if above is None or change.old not in map(_text, listed):
        return
    replaced = [change.new if _text(each) == change.old else each for each in listed]
    above[path[-1]] = replaced if isinstance(value, list) else replaced[0]
    yield f"{change.key}={change.old} is now {change.key}={_text(change.new)}"


def _remove(
    values: dict[Any, Any],
    path: list[str],
    change: Removed,
    *,
    saved: bool,
    typed_keys: Collection[str] | None,
) -> Iterator[str]:
    value = _take(values, path)
    if value is ABSENT or change.idles(value):
        return
    decides = typed_keys is not None and change.instead is not None
    if not saved or (decides and change.instead not in (typed_keys or ())):
        raise change.refused(value)
    yield f"{change.key}={_text(value)} is left out, as the key was removed: {change.now}"


def _text(value: Any) -> str:
    """Return a value as one types it; texts that Hydra's grammar has quoted without quotes."""
    return typed(getattr(value, "text", value))


def _section(values: dict[Any, Any], path: list[str]) -> dict[Any, Any] | None:
    """Return the dictionary at a path, None where there is none."""
    for name in path:
        inner = values.get(name)
        if not isinstance(inner, dict):
            return None
        values = inner
    return values


def _take(values: dict[Any, Any], path: list[str]) -> Any:
    """Remove and return the value at a path; ABSENT where there is none."""
    above = _section(values, path[:-1])
    return ABSENT if above is None else above.pop(path[-1], ABSENT)


def _put(values: dict[Any, Any], path: list[str], value: Any, change: Renamed) -> None:
    """Set the value at a path; sections are merged. Raises ConfigError where it has one."""
    for name in path[:-1]:
        if not isinstance(inner := values.setdefault(name, {}), dict):
            raise both_names(change.old, value, change.new)
        values = inner
    there = values.setdefault(path[-1], value)
    if there is value:
        return
    if not (isinstance(there, dict) and isinstance(value, dict)) or there.keys() & value.keys():
        raise both_names(change.old, value, change.new)
    there.update(value)


def both_names(old: str, value: Any, new: str) -> ConfigError:
    """Return the error for the old and the new name of a key side by side."""
    rule = f"is {new} now, and that is given too"
    return ConfigError(old, value, rule, advice=f"give {new} alone")
