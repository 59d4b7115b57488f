"""Bounds on single fields of a section."""

from __future__ import annotations

import math

from app.errors import ConfigError

# of any number here: floats beyond it no longer represent every integer, nor does JSON
MOST = 2**53


def above_zero(section: str, config: object, *names: str) -> None:
    """Raise ConfigError for a named field that is not positive; None means unset and passes.

    Suggests the field's default, or 1 if that is unset.
    """
    for name in names:
        value = _number(section, config, name)
        if value is not None and value <= 0:
            usual = getattr(type(config), name)
            near = 1 if usual is None else usual
            raise ConfigError(f"{section}.{name}", value, "must be above 0", nearest=near)


def at_least(section: str, config: object, low: float, *names: str) -> None:
    """Raise ConfigError for a named field below `low`; None means unset and passes."""
    for name in names:
        value = _number(section, config, name)
        if value is not None and value < low:
            raise ConfigError(f"{section}.{name}", value, f"must be at least {low}", nearest=low)


def finite(section: str, config: object, *names: str) -> None:
    """Raise ConfigError for a named field that is not a finite number.

    None means unset and passes.
    """
    for name in names:
        _number(section, config, name)


def _number(section: str, config: object, name: str) -> float | None:
    value: float | None = getattr(config, name)
    if value is None or abs(value) <= MOST:  # false for NaN and infinities
        return value
    # math.isfinite raises for an int too large for a float
    large = isinstance(value, int) or math.isfinite(value)
    rule = f"must be at most {MOST}" if large else "must be a finite number"
    raise ConfigError(f"{section}.{name}", value, rule, nearest=getattr(type(config), name))
