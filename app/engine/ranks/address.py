"""Recognise host names that mean the local host."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def loopback_address(host: str) -> str | None:
    """Return the loopback address that a host name means; None for any other host."""
    if host == "localhost":
        return LOOPBACK
    with suppress(ValueError):
        return host if ipaddress.ip_address(host).is_loopback else None
    return None
