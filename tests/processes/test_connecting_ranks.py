"""A rank that dies while the groups of a generation connect holds up none of the others."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import torch.distributed as dist

from app.engine.recovery.generations import Generations

LONG = datetime.timedelta(minutes=10)
ENDS_S = 60.0  # a rank that waits longer waits until LONG has passed


class Silent(dist.Store):
    """Store of a rank that tells where it listens, and then does nothing more."""

    def __init__(self, store: dist.Store, end: threading.Event) -> None:
        super().__init__()
        self.store, self.end = store, end

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        raise AssertionError("waits until the test ends")

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self.end.wait()
        raise RuntimeError("the test has ended")


def connected(generations: Generations, store: dist.Store, end: threading.Event) -> str:
    """Connect as rank 0 with a rank that does not connect, waking it; what came of it."""
    found: list[str] = []

    def connect(rank: int) -> None:
        try:
            own = store if rank == 0 else Silent(store, end)
            dist.ProcessGroupGloo(own, rank, 2, LONG)
        except RuntimeError as error:
            assert rank or generations.is_cause(error), error
            found.append("raises")
        else:
            found.append("connects")

    ranks = [threading.Thread(target=connect, args=(rank,), daemon=True) for rank in (1, 0)]
    for each in ranks:
        each.start()
    deadline = time.monotonic() + ENDS_S
    while not found and time.monotonic() < deadline:
        time.sleep(0.05)
        generations._wake()
    return found[0] if found else "waits"


def test_wait_for_a_dead_rank_to_connect_ends():
    """Addresses decide which of two ranks connects to the other, and they are drawn anew."""
    store, end = dist.HashStore(), threading.Event()
    generations = Generations(0, 2, lambda: store)
    outcomes = []
    while "raises" not in outcomes and len(outcomes) < 20:
        part = dist.PrefixStore(str(len(outcomes)), store)
        outcomes.append(connected(generations, part, end))
        assert outcomes[-1] != "waits"
    end.set()
    assert outcomes[-1] == "raises"
