"""Where the processes of a run meet: key-value stores, and who can reach them.

Whoever reaches a store can change what is in it: torch knows no password. On one host it listens on
loopback only; across hosts, on all networks of the one that keeps it.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
import threading
import time

import torch.distributed as dist

from app.engine.run.address import LOOPBACK, loopback_address
from app.errors import OwnError

TIMEOUT = datetime.timedelta(minutes=10)  # for the processes to meet
ANSWER_S = 30.0  # seconds that what listens at the address of a store has to answer as one
CONNECT_S = 5.0  # seconds for one try to connect
POLL_S = 0.1  # seconds between tries


def meet(rank: int, world_size: int, address: tuple[str, int] | None) -> dist.Store:
    """A store for all ranks, kept by rank 0 at this address; all call it. One rank needs none.

    Raises OwnError as `keep_store` and `join_store` do.
    """
    if world_size == 1:
        return dist.HashStore()
    assert address is not None
    return keep_store(*address) if rank == 0 else join_store(*address)


def keep_store(host: str, port: int) -> dist.TCPStore:
    """A store at a port of this host, which has this name; 0: at a free one.

    Raises OwnError where another program has the port.
    """
    address = loopback_address(host)
    try:
        listener = _listen(address, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        rule = f"cannot be listened at: {error.strerror}"
        if taken:
            rule = "another program on this host has this port"
        raise OwnError("MASTER_PORT", port, rule, advice="choose a free one") from error
    return dist.TCPStore(
        address or LOOPBACK,  # for this process: others know it by its name
        listener.getsockname()[1],
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int) -> dist.TCPStore:
    """The store that another process keeps, or will keep, there.

    Raises OwnError where nobody listens within TIMEOUT, or what does is no store.
    """
    _wait_for_listener(host, port)
    found: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
        except RuntimeError as error:  # it hung up
            found.append(error)

    # torch waits for an answer without end.
    thread = threading.Thread(target=connect, daemon=True, name="join store")
    thread.start()
    thread.join(ANSWER_S)
    if not found or isinstance(found[0], RuntimeError):
        rule = f"what listens there on {host} is another program: it does not answer as a store"
        raise OwnError("MASTER_PORT", port, rule, advice="choose a free one")
    return found[0]


def _listen(address: str | None, port: int) -> socket.socket:
    """At this address, or for None at all."""
    both = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
    return socket.create_server((address or "", port), family=family, dualstack_ipv6=both)


def _wait_for_listener(host: str, port: int) -> None:
    deadline = time.monotonic() + TIMEOUT.total_seconds()
    while True:
        try:
            _reach_listener(host, port)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                rule = f"nobody listens there on {host} within {TIMEOUT}: {error}"
                raise OwnError("MASTER_PORT", port, rule) from error
        time.sleep(POLL_S)


def _reach_listener(host: str, port: int) -> None:
    """Raises OSError where nobody listens there."""
    with socket.create_connection((host, port), CONNECT_S) as connection:
        # From the very port that it asks for a connection meets itself (TCP's simultaneous open).
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
