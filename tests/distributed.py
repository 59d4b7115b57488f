"""Run a function as several ranks on this machine: gloo, forked processes, a file store."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

# brings torch's compiler along, which every forked rank would load anew, two seconds each
import torch.nn.attention.bias

TIMEOUT_S = 600  # a machine may be busy
TELL = signal.SIGQUIT  # a rank that gets it prints where it is


def run_distributed(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """`fn(rank, *args)` in `world_size` forked processes of one gloo world; the results in rank
    order.

    Results travel pickled, so tensors should be small. A rank that fails fails the call with its
    traceback, and so do ranks of which none has ended for `timeout_s`, which print where they are.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank, args=(sender, fn, rank, world_size, f"{folder}/store", args)
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()  # so that a rank that dies closes its pipe
        try:
            return _results([receiver for receiver, _ in pipes], timeout_s)
        except TimeoutError:
            _where(ranks)
            raise
        finally:
            for process in ranks:
                process.kill()
                process.join()


def begin_fork() -> None:
    """The first call of every forked process: what its parent's threads hold would never be
    given back.
    """
    torch.set_num_threads(1)  # OpenMP's threads stayed behind, and the locks that they had
    # what the parent has not collected yet may own threads too, and would wait for them
    gc.freeze()


def _rank(
    sender: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    args: tuple[Any, ...],
) -> None:
    begin_fork()
    faulthandler.register(TELL, file=sys.__stderr__)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        sender.send((True, fn(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _where(ranks: Sequence[BaseProcess]) -> None:
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
        good, value = receiver.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    if not good:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value
