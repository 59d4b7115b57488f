"""Which names of hosts stand for the host that asks."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

LOOPBACK = "127.0.0.1"


def loopback_address(host: str) -> str | None:
    """The address of a host's name that stands for the one that asks; None: it is any host's."""
    if host == "localhost":
        return LOOPBACK
    with suppress(ValueError):
        return host if ipaddress.ip_address(host).is_loopback else None
    return None
