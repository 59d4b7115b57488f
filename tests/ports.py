"""Ports for programs that a test starts."""

from __future__ import annotations

import random
import socket

ASKED_FOR = range(10_000, 20_000)  # Linux does not connect from these by itself, as it is set up


def free_ports(count: int) -> list[int]:
    """Return that many ports of this host on which nobody listens."""
    found: list[int] = []
    for port in random.SystemRandom().sample(ASKED_FOR, len(ASKED_FOR)):
        if len(found) == count:
            break
        try:
            socket.create_server(("", port)).close()
        except OSError:  # taken
            continue
        found.append(port)
    return found


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]
