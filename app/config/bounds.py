"""Bounds that single fields of a section keep."""

from __future__ import annotations

import math

from app.errors import ConfigError

MOST = 2**53  # of any number here: beyond it JSON and floats no longer count in ones


def above_zero(section: str, config: object, *names: str) -> None:
    """Refuse any of the named fields that is not positive, offering its default, or 1 where that is
    unset; None means unset and passes.
    """
    for name in names:
        value = _number(section, config, name)
        if value is not None and value <= 0:
            usual = getattr(type(config), name)
            near = 1 if usual is None else usual
            raise ConfigError(f"{section}.{name}", value, "must be above 0", nearest=near)


def at_least(section: str, config: object, low: float, *names: str) -> None:
    """Refuse any of the named fields that is below `low`; None means unset and passes."""
    for name in names:
        value = _number(section, config, name)
        if value is not None and value < low:
            raise ConfigError(f"{section}.{name}", value, f"must be at least {low}", nearest=low)


def finite(section: str, config: object, *names: str) -> None:
    """Refuse any of the named fields that is no finite number; None means unset and passes."""
    for name in names:
        _number(section, config, name)


def _number(section: str, config: object, name: str) -> float | None:
    value: float | None = getattr(config, name)
    if value is None or abs(value) <= MOST:  # false for what is no number
        return value
    large = isinstance(value, int) or math.isfinite(value)  # a large int is no float
    rule = f"must be at most {MOST}" if large else "must be a finite number"
    raise ConfigError(f"{section}.{name}", value, rule, nearest=getattr(type(config), name))
