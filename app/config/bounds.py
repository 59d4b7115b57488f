"""Bounds that single fields of a section keep."""

from __future__ import annotations

from app.errors import ConfigError


def above_zero(section: str, config: object, *names: str) -> None:
    """Refuse any of the named fields that is not positive, offering its default; None means unset and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{section}.{name}", value, "must be above 0", getattr(type(config), name))


def at_least(section: str, config: object, low: float, *names: str) -> None:
    """Refuse any of the named fields that is below `low`; None means unset and passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{section}.{name}", value, f"must be at least {low}", low)
