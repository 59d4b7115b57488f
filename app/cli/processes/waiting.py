"""Lines of torchrun of ours while it waits for other nodes, and when they do not come."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from app.engine.ranks.meeting import wait_for_listener
from app.errors import OwnError

SILENT_S = 20.0  # seconds of waiting before a line says what for


def say(text: str) -> None:
    """Print a line of the launcher to stderr."""
    with suppress(OSError):  # the terminal may be gone, and that must not end the ranks
        print(f"torchrun: {text}", file=sys.stderr, flush=True)


@contextmanager
def announced(words: Callable[[], str]) -> Iterator[None]:
    """Say `words`, unless they are empty, if the block takes longer than SILENT_S; a thread calls
    them.
    """

    def speak() -> None:
        if told := words():
            say(f"waiting for {told}")

    timer = threading.Timer(SILENT_S, speak)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def missing_nodes(missing: int, nodes: int) -> str:
    """Return how many of the nodes have not come."""
    return f"{missing} of {nodes} nodes"


def not_come(missing: str, timeout: timedelta) -> str:
    """Return the line on nodes that have not come in time, with what to check."""
    return (
        f"{missing} did not come within {timeout.total_seconds():.0f} s; start the same command on "
        "every node, with the same --nnodes, address and --rdzv-id, and check that its port is open"
    )


def wait_for_first_node(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the launcher of the first node listens. Raises RendezvousTimeoutError.

    torch waits for it in C++, where no signal is handled, and prints some 60 lines in the end.
    """
    try:
        wait_for_listener(host, port, timeout)
    except OwnError:
        raise RendezvousTimeoutError(not_come("the node there", timeout)) from None
