"""Tab completion of values, spelt as one types them; Hydra offers the current value in Python's
spelling.
"""

from __future__ import annotations

import typing
from enum import Enum
from typing import Any

from hydra.plugins.completion_plugin import CompletionPlugin

from app.cli.options.keys import default_of, type_of
from app.errors import typed

HYDRAS = CompletionPlugin._get_matches


def complete_values_as_typed() -> None:
    """Replace the values that Hydra's completion offers, for every shell."""
    CompletionPlugin._get_matches = staticmethod(_matches)  # type: ignore[method-assign]


def _matches(config: Any, word: str) -> list[str]:
    key, equals, begun = word.partition("=")
    if not equals:
        return HYDRAS(config, word)
    return [f"{key}={value}" for value in values_of(key) if value.startswith(begun)]


def values_of(key: str) -> list[str]:
    """Return the values of a key with a closed set of them, else its default; none if it is
    unknown.
    """
    kind = type_of(key)
    found = list[str]()
    for hint in (kind, *typing.get_args(kind)):
        if isinstance(hint, type) and issubclass(hint, Enum):
            found += [str(choice.value) for choice in hint]
        elif hint is bool:
            found += ["false", "true"]
    if kind is not None and not found:
        default = default_of(key)
        found = [] if default is None or default == () else [typed(default)]
    return found + ["null"] * (type(None) in typing.get_args(kind))
