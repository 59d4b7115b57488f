"""Frozen dataclasses that compute their hash once."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
KEPT = "_hash"  # attribute beside the fields


def hashed_once(section: type[T]) -> type[T]:
    """Return a frozen dataclass without slots that keeps its hash once computed.

    A search looks up thousands of runs with hundreds of values each. The hash stays out of pickles,
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
        return {name: value for name, value in self.__dict__.items() if name != KEPT}

    changed: Any = section
    changed.__hash__ = kept
    changed.__getstate__ = pickled
    return section
