"""Entries of lists of data sources: `data.sources` and `data.validation`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from math import isfinite
from typing import Any

from app.choices import AfterEnd, Source
from app.errors import ConfigError, nearest

OWN = ("label", "weight", "after_end")  # keys that only an entry has
FORBIDDEN = frozenset("/=,[]{}'\"\n")  # in labels, which are parts of metrics' names


@dataclass(frozen=True)
class SourceConfig:
    """One source of documents. The keys from `source` on are those of `data`; null: its value."""

    label: str = ""  # its name in reports and when a run resumes; "": by its path or name
    weight: float = 1.0  # of its tokens, relative to those of the others
    after_end: AfterEnd = AfterEnd.repeat  # what happens when all of its documents were read
    source: Source | None = None  # null: by the path's suffix
    path: Any = None  # a file or glob, or a list of them
    name: str | None = None  # of a dataset
    config_name: str | None = None  # of that dataset
    split: str | None = None  # of that dataset
    text_field: str | None = None  # column that holds the text
    streaming: bool | None = None  # read while training

    def given(self) -> dict[str, Any]:
        """Return the keys of `data` that it sets."""
        keys = (each.name for each in fields(self) if each.name not in OWN)
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


def source_list(key: str, value: Any) -> tuple[SourceConfig, ...]:
    """Check the list of sources of a key. A path, or a list of paths, is one source.

    Raises ConfigError.
    """
    if not value:
        return ()
    if isinstance(value, str) or (
        isinstance(value, Sequence) and all(isinstance(each, str) for each in value)
    ):
        value = [{"path": value}]
    if not isinstance(value, Sequence):
        raise ConfigError(key, value, "must be a list of sources", advice=_example(key))
    found = tuple(_entry(key, each) for each in value)
    labels = [each.label for each in found]
    for label in labels:
        if labels.count(label) > 1:
            rule = f"names {labels.count(label)} sources {label}"
            raise ConfigError(key, labels, rule, advice="give each a label of its own: label=…")
    return found


def _entry(key: str, given: Any) -> SourceConfig:
    if isinstance(given, SourceConfig):
        return given
    if isinstance(given, str):
        given = {"path": given}
    if not isinstance(given, Mapping):
        raise ConfigError(key, given, "is no source", advice=_example(key))
    names = [each.name for each in fields(SourceConfig)]
    for name in given:
        if name not in names:
            rule = f"a source has no key {name}; it has {', '.join(names)}"
            raise ConfigError(key, name, rule, guess=nearest(str(name), names))
    made = {name: _typed(key, name, value) for name, value in given.items() if value is not None}
    if not made.get("label"):
        made["label"] = _label(made)
    if bad := FORBIDDEN.intersection(made["label"]):
        rule = f"is a label, which has no {' '.join(sorted(bad))}"
        raise ConfigError(key, made["label"], rule, advice="choose another: label=…")
    return SourceConfig(**made)


def _typed(key: str, name: str, value: Any) -> Any:
    """Return the value of an entry's key in its type. Raises ConfigError."""
    choices: dict[str, type[Enum]] = {"after_end": AfterEnd, "source": Source}
    if name in choices:
        if isinstance(value, choices[name]):
            return value
        words = [each.value for each in choices[name]]
        if value not in words:
            rule = f"{name} of a source is one of {', '.join(words)}"
            raise ConfigError(key, value, rule, guess=nearest(str(value), words))
        return choices[name](value)
    if name == "weight":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not isfinite(value) or value <= 0:
            rule = "weight of a source is a number above 0"
            raise ConfigError(key, value, rule, advice="leave the source out, or weigh it 1.0")
        return float(value)
    if name == "path":
        listed = (value,) if isinstance(value, str) else tuple(value)
        return listed
    kind = bool if name == "streaming" else str
    if not isinstance(value, kind):
        raise ConfigError(key, value, f"{name} of a source is a {kind.__name__}")
    return value


def _label(made: Mapping[str, Any]) -> str:
    """Return a name for a source: that of its file without suffixes, of its dataset, its kind."""
    if made.get("path"):
        last = str(made["path"][0]).rstrip("/").rpartition("/")[2]
        stem = last.split(".")[0].strip("*?[]")
        folder = str(made["path"][0]).rstrip("/").rpartition("/")[0].rpartition("/")[2]
        return stem or folder or "files"
    name = str(made.get("name") or "").rpartition("/")[2]
    return name or (made["source"].value if "source" in made else "stdlib")


def _example(key: str) -> str:
    return f"give for example {key}='[{{path: a.jsonl, weight: 2}}, {{path: b.jsonl}}]'"
