"""Run a function as several ranks on this machine: gloo, forked processes, a file store."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch.distributed as dist

# brings torch's compiler along, which every forked rank would load anew, two seconds each
from tests.forks import Process

TIMEOUT_S = 600  # a machine may be busy
TELL = signal.SIGQUIT  # a rank that gets it prints where it is


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """`fn(rank, *args)` in `world_size` forked processes of one gloo world; the results in rank
    order.

    Arguments and results travel pickled, so tensors should be small; see tests/forks.py for what
    else reaches the ranks. A rank that fails fails the call with its traceback, and so do ranks of
    which none has ended for `timeout_s`, which print where they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes = [Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            Process(
                _rank, (fn, rank, world_size, f"{folder}/store", args), handles=(sender.fileno(),)
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(ranks, pipes, strict=True):
                process.start()
                sender.close()  # so that a rank that dies closes its pipe
            return _results([receiver for receiver, _ in pipes], timeout_s)
        except TimeoutError:
            _where(ranks)
            raise
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _rank(
    handle: int,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    sender = Connection(handle, readable=False)
    faulthandler.register(TELL, file=sys.__stderr__)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        sender.send_bytes(cloudpickle.dumps((True, fn(rank, *args))))
        dist.destroy_process_group()
    except BaseException:
        sender.send_bytes(cloudpickle.dumps((False, traceback.format_exc())))


def _where(ranks: Sequence[Process]) -> None:
    for process in ranks:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, TELL)
    time.sleep(1)  # for them to print


def _results(receivers: list[Connection], timeout_s: float) -> list[Any]:
    """The ranks' results in order, read as they come: the first failure ends the wait."""
    results: dict[Connection, Any] = {}
    while len(results) < len(receivers):
        ready = wait(
            [receiver for receiver in receivers if receiver not in results], timeout=timeout_s
        )
        if not ready:
            raise TimeoutError(
                f"ranks {[r for r, end in enumerate(receivers) if end not in results]} said "
                f"nothing for {timeout_s:.0f} s"
            )
        for receiver in ready:
            results[receiver] = _result(receivers.index(receiver), receiver)
    return [results[receiver] for receiver in receivers]


def _result(rank: int, receiver: Connection) -> Any:
    try:
        good, value = cloudpickle.loads(receiver.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    if not good:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value
