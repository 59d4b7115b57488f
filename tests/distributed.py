"""Run a function as several ranks on this machine: gloo, forked processes, a file store."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def run_distributed(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`fn(rank, *args)` in `world_size` forked processes of one gloo world; the results in rank order.

    Results travel pickled, so tensors should be small. A rank that fails fails the call with its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank, args=(sender, fn, rank, world_size, f"{folder}/store", args))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in ranks:
            process.start()
        try:
            return [_result(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
        finally:
            for process in ranks:
                process.join(timeout=5)
                process.kill()


def _rank(sender: Connection, fn: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # first of all: a parent that ran threads leaves locks behind
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        sender.send((True, fn(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))


def _result(rank: int, receiver: Connection) -> Any:
    if not receiver.poll(TIMEOUT_S):
        raise TimeoutError(f"rank {rank} said nothing for {TIMEOUT_S} s")
    good, value = receiver.recv()
    if not good:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value
