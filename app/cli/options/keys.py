"""The keys of the configuration: their names, types and defaults."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any

from app.config import ModelConfig, MoEConfig, Run


def defaults() -> Run:
    """Return a run of defaults with a section `model.moe`, so that overrides can reach into it."""
    return Run(ModelConfig(moe=MoEConfig()))


def all_keys() -> list[str]:
    """Return every dotted key of the configuration, sections included."""
    return list(_keys(Run, ""))


def _keys(section: type, prefix: str) -> Iterator[str]:
    for name, hint in typing.get_type_hints(section).items():
        yield prefix + name
        for kind in (k for k in (hint, *typing.get_args(hint)) if k is not NoneType):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from _keys(kind, f"{prefix}{name}.")


def type_of(key: str) -> Any:
    """Return the annotation of a dotted key, None for an unknown key."""
    section: Any = Run
    for name in key.split("."):
        hints = typing.get_type_hints(section) if dataclasses.is_dataclass(section) else {}
        hint = hints.get(name)
        kinds = [kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind)]
        section = kinds[0] if kinds else hint
    return section


def is_section(key: str) -> bool:
    """Return whether a dotted key is a section."""
    return dataclasses.is_dataclass(type_of(key))


def default_of(key: str) -> object:
    """Return the default of a dotted key, None where it has none."""
    section: object = defaults()
    for name in key.split("."):
        section = getattr(section, name, None)
    return section.value if isinstance(section, Enum) else section
