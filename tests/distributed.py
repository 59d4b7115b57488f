"""Run a function as several ranks on this machine: gloo, forked processes, a file store.

Ranks are forked by a server, and the server from pytest before the first test: a rank holds
nothing of the tests that its pytest process has run. torch's autograd refuses to work in a fork of
a process that has run a backward pass, and a test's patches or threads would change another's.
"""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any
from unittest import mock

import cloudpickle
import torch
import torch.distributed as dist

# brings torch's compiler along, which every forked rank would load anew, two seconds each
import torch.nn.attention.bias

TIMEOUT_S = 600  # a machine may be busy
TELL = signal.SIGQUIT  # a rank that gets it prints where it is


class RankServer:
    """A process that forks ranks, forked itself from a pytest process that has run no test yet."""

    def __init__(self) -> None:
        self._end, far_end = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(far_end, self._end), daemon=False
        )
        self._process.start()
        far_end.close()

    def call(self, request: bytes) -> Any:
        """Return what the ranks of a request return; raises what went wrong among them."""
        self._end.send_bytes(request)
        for output in (1, 2):  # pytest captures each test's in files of its own
            send_handle(self._end, output, self._process.pid)
        good, value = cloudpickle.loads(self._end.recv_bytes())
        if not good:
            raise value
        return value

    def stop(self) -> None:
        self._end.close()
        self._process.join()


class Servers:
    """The server of this pytest process, once it has been started."""

    own: RankServer | None = None


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = TIMEOUT_S,
    patches: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Return what `fn(rank, *args)` returns in `world_size` processes of one gloo world, by rank.

    `fn`, arguments and results travel pickled, functions that no module holds by value; tensors
    should be small. The ranks have this process's environment variables and folder, not its
    patched attributes: `patches` holds those by name ("app.hf.write.FILE_BYTES"). A rank that fails
    fails the call with its traceback, and so do ranks of which none has ended for `timeout_s`
    seconds, which print where they are.
    """
    assert Servers.own is not None, "tests/conftest.py starts it"
    here = (dict(os.environ), os.getcwd(), sys.path[:])
    request = (fn, world_size, args, timeout_s, dict(patches or {}))
    return Servers.own.call(cloudpickle.dumps((here, cloudpickle.dumps(request))))


def _serve(requests: Connection, parents_end: Connection) -> None:
    """Answer requests until the pytest process closes its end."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    while True:
        try:
            (environ, folder, sys.path[:]), request = cloudpickle.loads(requests.recv_bytes())
        except EOFError:
            return
        for output in (1, 2):
            handle = recv_handle(requests)
            os.dup2(handle, output)
            os.close(handle)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        try:
            # imports the modules of the test, once for all ranks and all later requests
            answer = (True, _ranks(*cloudpickle.loads(request)))
        except Exception as error:
            error.__traceback__ = None
            answer = (False, error)
        requests.send_bytes(cloudpickle.dumps(answer))


def _ranks(
    fn: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout_s: float,
    patches: dict[str, Any],
) -> list[Any]:
    """Fork the ranks and wait for their results."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank,
                args=(sender, fn, rank, world_size),
                kwargs={"store": f"{folder}/store", "args": args, "patches": patches},
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
    *,
    store: str,
    args: tuple[Any, ...],
    patches: dict[str, Any],
) -> None:
    begin_fork()
    faulthandler.register(TELL, file=sys.__stderr__)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
        )
        with ExitStack() as patched:
            for name, value in patches.items():
                patched.enter_context(mock.patch(name, value))
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
