"""The choice as an experiment: a YAML file with the reason of each value."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from app.advice.combinations import PlannedCombination
from app.cli.options.arguments import Typed, key_of
from app.plan.formatting import gib

EXPERIMENT = "experiment"


def experiment_text(
    chosen: PlannedCombination,
    combinations: Sequence[PlannedCombination],
    times: Mapping[str, float],
    *,
    typed: Typed,
    about: Sequence[str],
) -> str:
    """Return the text of an experiment that is the typed run with the chosen combination.

    times: measured milliseconds by key. about: lines of the comment at its top.
    """
    groups = [word for word in typed.overrides if _is_group(word)]
    # Hydra wants what overrides other lists at the end
    defaults = sorted(map(_default, groups), key=lambda each: each.startswith("override"))
    lines = ["# @package _global_", *(f"# {line}" for line in about)]
    if defaults:
        lines += ["defaults:", *(f"  - {each}" for each in defaults), ""]
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for word in typed.overrides:
        if not _is_group(word):
            _put(values, word)
    for override in chosen.overrides:
        (word,) = shlex.split(override)
        _put(values, word)
        reasons[key_of(word)] = reason(key_of(word), chosen, combinations, times)
    return "\n".join([*lines, *_block(values, reasons)]) + "\n"


def reason(
    key: str,
    chosen: PlannedCombination,
    combinations: Sequence[PlannedCombination],
    times: Mapping[str, float],
) -> str:
    """Return why a key has its value: the best combinations with other values of it."""
    own = _value(key, chosen)
    others = [each for each in combinations if _value(key, each) != own]
    tried = [each for each in others if each.key in times]
    if tried and chosen.key in times:
        best = min(tried, key=lambda each: times[each.key])
        more = times[best.key] / times[chosen.key] - 1
        return f"measured: {more:+.1%} time with {_value(key, best)}"
    fitting = [each for each in others if each.fits]
    if fitting:
        best = min(fitting, key=lambda each: each.seconds)
        more = best.seconds / chosen.seconds - 1
        return f"planned: {more:+.1%} time with {_value(key, best)}"
    if others:
        least = min(others, key=lambda each: each.memory)
        return f"planned: {_value(key, least)} needs {gib(least.memory)} GiB, which does not fit"
    return "as every other combination"


def _value(key: str, each: PlannedCombination) -> str:
    """Return the value of a key in a combination; "the typed value" where it changes nothing."""
    found = (override for override in each.overrides if key_of(override) == key)
    return next((override.partition("=")[2] for override in found), "the typed value")


def _is_group(word: str) -> bool:
    return "." not in key_of(word) and word.partition("=")[0].lstrip("+") not in (
        "run_dir",
        "resume",
    )


def _default(word: str) -> str:
    """Return the entry of a defaults list that a typed option stands for."""
    group, _, option = word.lstrip("+").partition("=")
    return option if group == EXPERIMENT else f"override /{group}: {option}"


def _put(values: dict[str, Any], word: str) -> None:
    """Set a key, dotted, to the value typed; text that is no YAML value stays text."""
    key, _, text = word.lstrip("+").partition("=")
    *sections, name = key.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = yaml.safe_load(text)


def _block(values: Mapping[str, Any], reasons: Mapping[str, str], at: str = "") -> Iterator[str]:
    depth = "  " * at.count(".")
    for name, value in values.items():
        key = f"{at}{name}"
        if isinstance(value, dict):
            yield f"{depth}{name}:"
            yield from _block(value, reasons, f"{key}.")
            continue
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n")
        why = f" # {reasons[key]}" if key in reasons else ""
        yield f"{depth}{name}: {text.strip()}{why}"
