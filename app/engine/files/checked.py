"""Read JSON of a run folder strictly, and check it against a schema before anything uses it.

A schema is a `Kind`: a function of a field's name and value that raises `FieldError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from app.errors import ConfigError

Kind = Callable[[str, Any], None]
LARGEST = 2**53  # of a number, so that sums fit int64
DEEPEST = 64  # levels of nesting; the state of a stream has about 20
SHOWN = 60  # characters of a value in a message
MOST_TOLD = 300  # characters of what is wrong with a file


class FieldError(ValueError):
    """A field of a file with its value, and what it must be."""

    def __init__(self, field: str, value: object, must: str) -> None:
        text = json.dumps(value)
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
        super().__init__(f"{field}={shown} must be {must}" if field else f"must be {must}")


def unreadable(path: Path, error: Exception, advice: str) -> ConfigError:
    """Return the error for a file of a run folder that cannot be read or is not what it should be;
    `advice` is an imperative.
    """
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, RecursionError):
        told = f"is nested deeper than {DEEPEST} levels"
    short = " ".join(told.split())[:MOST_TOLD]
    return ConfigError("file", path, f"cannot be read: {short}", advice=advice)


def parse_strictly(text: bytes) -> Any:
    """Parse JSON in UTF-8. Raises ValueError for duplicate keys, for numbers that are not finite,
    and for nesting deeper than DEEPEST.
    """
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except RecursionError:
        raise ValueError(f"is nested deeper than {DEEPEST} levels") from None
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict | list):
                inner.extend(each.values() if isinstance(each, dict) else each)
        level = inner
        if not level:
            return value
    raise ValueError(f"is nested deeper than {DEEPEST} levels")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {json.dumps(twice)[:SHOWN]} twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:SHOWN]} is too large for a number")
    return value


def anything(field: str, value: Any) -> None:
    """Accept every value."""


def whole(least: int = 0, most: int = LARGEST) -> Kind:
    """Return the kind of whole numbers within bounds."""

    def check(field: str, value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            bounds = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
            raise FieldError(field, value, f"a whole number {bounds}")

    return check


def number(least: float) -> Kind:
    """Return the kind of finite numbers of at least `least`."""

    def check(field: str, value: Any) -> None:
        if type(value) not in (int, float) or not least <= value <= LARGEST:
            raise FieldError(field, value, f"a number of at least {least}")

    return check


def boolean(field: str, value: Any) -> None:
    """Accept true and false."""
    if type(value) is not bool:
        raise FieldError(field, value, "true or false")


# surrogates but for those that stand for bytes of file names (PEP 383)
UNREADABLE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def text(field: str, value: Any) -> None:
    """Accept text, also with bytes of file names that the locale cannot read."""
    if not isinstance(value, str) or UNREADABLE.search(value):
        raise FieldError(field, value, "text")


HEX = frozenset("0123456789abcdef")


def digest(digits: int) -> Kind:
    """Return the kind of checksums of so many hexadecimal digits."""

    def check(field: str, value: Any) -> None:
        if not isinstance(value, str) or len(value) != digits or set(value) - HEX:
            raise FieldError(field, value, f"{digits} hexadecimal digits")

    return check


def one_of(*values: object) -> Kind:
    """Return the kind of these values."""

    def check(field: str, value: Any) -> None:
        if not any(type(value) is type(each) and value == each for each in values):
            raise FieldError(field, value, "one of " + ", ".join(map(json.dumps, values)))

    return check


def nullable(kind: Kind) -> Kind:
    """Return the kind of null and what `kind` accepts."""

    def check(field: str, value: Any) -> None:
        if value is not None:
            kind(field, value)

    return check


def list_of(kind: Kind, count: int | None = None) -> Kind:
    """Return the kind of lists, of `count` values; None: of any length."""

    def check(field: str, value: Any) -> None:
        if not isinstance(value, list) or count not in (None, len(value)):
            raise FieldError(field, value, "a list" if count is None else f"a list of {count}")
        for place, each in enumerate(value):
            kind(f"{field}[{place}]", each)

    return check


def tuple_of(*kinds: Kind) -> Kind:
    """Return the kind of lists with a value of each of these kinds."""

    def check(field: str, value: Any) -> None:
        list_of(anything, len(kinds))(field, value)
        for place, (kind, each) in enumerate(zip(kinds, value, strict=True)):
            kind(f"{field}[{place}]", each)

    return check


def map_of(kind: Kind) -> Kind:
    """Return the kind of objects with any names."""

    def check(field: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise FieldError(field, value, "an object")
        for name, each in value.items():
            text(inside(field, "name"), name)
            kind(inside(field, name), each)

    return check


@dataclass(frozen=True, slots=True)
class Fields:
    """Kind of objects with these fields and no others."""

    required: Mapping[str, Kind]
    optional: Mapping[str, Kind]

    def __call__(self, field: str, value: Any) -> None:
        """Check an object."""
        map_of(anything)(field, value)
        known = {**self.required, **self.optional}
        for name, each in value.items():
            if name not in known:
                raise FieldError(inside(field, name), each, "left out: there is no such field")
            known[name](inside(field, name), each)
        for name in self.required:
            if name not in value:
                raise FieldError("", None, f"complete, and has no {inside(field, name)}")


def fields(required: Mapping[str, Kind], **optional: Kind) -> Kind:
    """Return the kind of objects with these fields, some of them optional."""
    return Fields(required, optional)


def inside(field: str, name: str) -> str:
    """Return the dotted name of a field of a field."""
    return f"{field}.{name}" if field else name


def by_fields(cases: Mapping[str, Kind], otherwise: Kind) -> Kind:
    """Return the kind of objects that the first of some names decides."""

    def check(field: str, value: Any) -> None:
        known = value if isinstance(value, dict) else {}
        next((kind for name, kind in cases.items() if name in known), otherwise)(field, value)

    return check
