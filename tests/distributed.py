"""Run a function as several ranks on this machine: gloo, a file store, processes that serve one
call after another.

Shapes and results are the caller's. A rank of one call must not see another call: `tests.ranks`
puts back what a function may change in its process, and ends a process where it cannot.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from tests.ranks import Rank

TIMEOUT_S = 600  # a machine may be busy
TELL = signal.SIGQUIT  # a rank that gets it prints where it is


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """`fn(rank, *args)` in `world_size` processes of one gloo world; the results in rank order.

    Arguments and results travel pickled, so tensors should be small; see tests/forks.py for what
    else reaches the ranks. A rank that fails fails the call with its traceback, and so do ranks of
    which none has ended for `timeout_s`, which print where they are.
    """
    ranks = POOL.take(fn, world_size)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for number, rank in enumerate(ranks):
                rank.ask(fn, number, world_size, store=f"{folder}/store", args=args)
            return _results(ranks, timeout_s)
        except TimeoutError:
            _where(ranks)
            raise
        finally:
            POOL.give_back(ranks)


class Pool:
    """Processes of this pytest process that wait for a call, kept for functions of one module.

    Those of the next module start small again.
    """

    def __init__(self) -> None:
        self.module = ""
        self.idle: list[Rank] = []

    def take(self, fn: Callable[..., Any], count: int) -> list[Rank]:
        """Return processes for a call, new ones where none is left."""
        if fn.__module__ != self.module:
            self.stop()
            self.module = fn.__module__
        ranks = [rank for rank in self.idle[:count] if rank.is_clean()]
        self.idle = self.idle[count:]
        return [*ranks, *(Rank(fn) for _ in range(count - len(ranks)))]

    def give_back(self, ranks: Sequence[Rank]) -> None:
        """Keep the processes that have answered; end the others."""
        for rank in ranks:
            if rank.answered:
                self.idle.append(rank)
            else:
                rank.end()

    def stop(self) -> None:
        """End all processes."""
        for rank in self.idle:
            rank.end()
        self.idle.clear()


POOL = Pool()


def _where(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        if not rank.answered and rank.process.is_alive():
            assert rank.process.pid is not None
            os.kill(rank.process.pid, TELL)
    time.sleep(1)  # for them to print


def _results(ranks: Sequence[Rank], timeout_s: float) -> list[Any]:
    """The ranks' results in order, read as they come: the first failure ends the wait."""
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waited = {
            rank.end_here: number for number, rank in enumerate(ranks) if number not in results
        }
        ready = wait(list(waited), timeout=timeout_s)
        if not ready:
            raise TimeoutError(f"ranks {[*waited.values()]} said nothing for {timeout_s:.0f} s")
        for end in ready:
            number = waited[end]
            results[number] = _result(number, ranks[number])
    return [results[number] for number in range(len(ranks))]


def _result(number: int, rank: Rank) -> Any:
    try:
        good, value = rank.answer()
    except EOFError:
        raise AssertionError(f"rank {number} died without a word") from None
    if not good:
        raise AssertionError(f"rank {number} failed:\n{value}")
    return value
