"""Frozen dataclasses that compute their hash once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

T = TypeVar("T")
KEPT = "_hash"  # attribute beside the fields


def hashed_once(section: type[T]) -> type[T]:
    """Return a frozen dataclass without slots that keeps its hash once computed.

    A search looks up thousands of runs with hundreds of values each. Pickles have the fields alone,
    as other processes hash texts differently.
    """
    of_fields: Any = section.__hash__

    def kept(self: Any) -> int:
        found: int | None = self.__dict__.get(KEPT)
        if found is None:
            found = of_fields(self)
            self.__dict__[KEPT] = found
        return found

    def pickled(self: Any) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    changed: Any = section
    changed.__hash__ = kept
    changed.__getstate__ = pickled
    return section
