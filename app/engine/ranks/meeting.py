"""Rendezvous of a run's processes: key-value stores, and who can reach them.

Anyone who can connect to a store can change it: torch has no password. A store for one host listens
on loopback only; a store for several hosts on all networks of its host.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
import threading
import time

import torch.distributed as dist

from app.engine.ranks.address import LOOPBACK, loopback_address
from app.errors import OwnError

TIMEOUT = datetime.timedelta(minutes=10)  # of the rendezvous
ANSWER_S = 30.0  # seconds for a listener to answer as a store
CONNECT_S = 5.0  # seconds per attempt to connect
POLL_S = 0.1  # seconds between attempts


def meet(rank: int, world_size: int, address: tuple[str, int] | None) -> dist.Store:
    """Return a store for all ranks, kept by rank 0 at this address; all ranks call it.

    A single rank gets a store in memory. Raises OwnError as `keep_store` and `join_store` do.
    """
    if world_size == 1:
        return dist.HashStore()
    assert address is not None
    return keep_store(*address) if rank == 0 else join_store(*address)


def keep_store(host: str, port: int) -> dist.TCPStore:
    """Start a store at a port of this host, whose name is `host`; port 0 picks a free one.

    Raises OwnError if another program has the port.
    """
    address = loopback_address(host)
    try:
        listener = _listen(address, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        rule = f"cannot listen there: {error.strerror}"
        if taken:
            rule = "another program on this host uses this port"
        raise OwnError("MASTER_PORT", port, rule, advice="choose a free one") from error
    return dist.TCPStore(
        address or LOOPBACK,  # for this process only: others connect by the host's name
        listener.getsockname()[1],
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the store that another process keeps, or will keep, there.

    Raises OwnError if nothing listens there within TIMEOUT, or if the listener is not a store.
    """
    wait_for_listener(host, port)
    found: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            found.append(dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
        except RuntimeError as error:  # the listener closed the connection
            found.append(error)

    # In a thread, since torch waits for an answer forever.
    thread = threading.Thread(target=connect, daemon=True, name="join store")
    thread.start()
    thread.join(ANSWER_S)
    if not found or isinstance(found[0], RuntimeError):
        rule = f"another program listens there on {host}: it does not answer as a store"
        raise OwnError("MASTER_PORT", port, rule, advice="choose a free one")
    return found[0]


def _listen(address: str | None, port: int) -> socket.socket:
    """Open a listening socket at this address; None listens at all addresses."""
    both = address is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in (address or "") else socket.AF_INET
    return socket.create_server((address or "", port), family=family, dualstack_ipv6=both)


def wait_for_listener(host: str, port: int, timeout: datetime.timedelta | None = None) -> None:
    """Wait until a program listens there. Raises OwnError after `timeout` (TIMEOUT)."""
    timeout = timeout or TIMEOUT
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            _reach_listener(host, port)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                rule = f"nothing listens there on {host} within {timeout}: {error}"
                raise OwnError("MASTER_PORT", port, rule) from error
        time.sleep(POLL_S)


def _reach_listener(host: str, port: int) -> None:
    """Raise OSError if nothing listens there."""
    with socket.create_connection((host, port), CONNECT_S) as connection:
        # If the source port happens to be the target port, a socket connects to itself.
        if connection.getsockname() == connection.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
