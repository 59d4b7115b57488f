"""Processes of tests, forked by a server that has run no test.

Every pytest process starts one server before its first test, once the modules of all tests are
loaded. A process forked by it loads none of them, and holds nothing that tests have left in their
pytest process: no threads, no autograd state (torch refuses backward passes in a fork of a process
that has run one), no patches except those recorded here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import cloudpickle
import pytest
import torch

POLL_S = 0.002  # seconds between looks at a process that is waited for


def nap(pid: int, deadline: float | None = None) -> None:
    """Sleep until a process ends, at most a second and until `deadline` (`time.monotonic`).

    Sleeps for POLL_S where the system cannot wait for other processes.
    """
    most = 1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic()))
    try:
        handle = os.pidfd_open(pid)
    except (AttributeError, OSError):
        time.sleep(min(most, POLL_S))
        return
    try:
        select.select([handle], [], [], most)
    finally:
        os.close(handle)


class Patches(pytest.MonkeyPatch):
    """pytest's MonkeyPatch, whose patches forked processes repeat.

    Environment variables and the working folder reach them too.
    """

    active: list[Patches] = []  # noqa: RUF012 - of this process

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.active.append(self)

    def undo(self) -> None:
        """Undo all patches; forked processes no longer get them."""
        super().undo()
        self.calls.clear()
        if self in self.active:
            self.active.remove(self)

    def setattr(self, *args: Any, **named: Any) -> None:
        """Patch an attribute, here and in forked processes."""
        super().setattr(*args, **named)
        self.calls.append(("setattr", args, named))

    def setitem(self, *args: Any, **named: Any) -> None:
        """Patch an item, here and in forked processes."""
        super().setitem(*args, **named)
        if args[0] is not os.environ:
            self.calls.append(("setitem", args, named))

    def delattr(self, *args: Any, **named: Any) -> None:
        """Remove an attribute, here and in forked processes."""
        super().delattr(*args, **named)
        self.calls.append(("delattr", args, named))

    @classmethod
    def repeat(cls, calls: Sequence[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> Patches:
        """Apply patches that another process has recorded, and return them."""
        patch = cls()
        for name, args, named in calls:
            getattr(patch, name)(*args, **named)
        return patch


class Process:
    """A process forked by the server, with the interface of `multiprocessing.Process`.

    It calls `target(*handles, *args)` with its own copies of the file descriptors `handles`.
    Function and arguments travel pickled, so the caller does not see changes to them. The process
    gets the caller's environment variables, working folder, warning filters, standard output and,
    if `repeats_patches`, recorded patches. The server calls `first` before it forks.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        handles: Sequence[int] = (),
        *,
        repeats_patches: bool = True,
        first: Callable[[], object] = int,
    ) -> None:
        self.pid: int | None = None
        self.exitcode: int | None = None
        self._work = (target, tuple(args))
        self._handles = handles
        self._repeats_patches = repeats_patches
        self._first = first

    def start(self) -> None:
        """Fork it."""
        assert Server.own is not None, "tests/conftest.py starts it"
        active = Patches.active if self._repeats_patches else []
        calls = [call for patches in active for call in patches.calls]
        state = (dict(os.environ), os.getcwd(), sys.path[:])
        work = cloudpickle.dumps((self._first, *self._work, calls, warnings.filters))
        self.pid = Server.own.ask(("start", state, work), (1, 2, *self._handles))

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            assert self.pid is not None, "it is alive"
            nap(self.pid, deadline)

    def is_alive(self) -> bool:
        """Return whether it runs; sets `exitcode` once it has ended."""
        if self.exitcode is None and self.pid is not None:
            assert Server.own is not None
            self.exitcode = Server.own.ask(("exit code", self.pid))
        return self.exitcode is None and self.pid is not None

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.is_alive() and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)


class Server:
    """The server of this pytest process: a process that does nothing but fork others."""

    own: Server | None = None

    def __init__(self) -> None:
        self._end, far_end = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(far_end, self._end)
        )
        process.start()
        self._process = process
        far_end.close()

    def ask(self, request: Any, handles: Sequence[int] = ()) -> Any:
        """Return the server's answer; raises what it raised."""
        self._end.send_bytes(cloudpickle.dumps((request, len(handles))))
        for handle in handles:
            send_handle(self._end, handle, self._process.pid)
        good, value = cloudpickle.loads(self._end.recv_bytes())
        if not good:
            raise value
        return value

    def stop(self) -> None:
        """End the server and what it has forked."""
        self._end.close()
        self._process.join()


def begin_fork() -> None:
    """Prepare a forked process: what its parent's threads hold would never be given back."""
    torch.set_num_threads(1)  # OpenMP's threads stayed behind, and the locks that they had
    # what the parent has not collected yet may own threads too, and would wait for them
    gc.freeze()


def _serve(requests: Connection, parents_end: Connection) -> None:
    """Answer requests until the pytest process closes its end."""
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends this one
    sys.stdout, sys.stderr = (open(each, "w", 1, closefd=False) for each in (1, 2))  # noqa: SIM115
    children: dict[int, BaseProcess] = {}
    while True:
        try:
            request, count = cloudpickle.loads(requests.recv_bytes())
        except EOFError:
            break
        with _received(requests, count) as handles:
            try:
                answer = (True, _answer(request, handles, requests, children))
            except Exception as error:
                error.__traceback__ = None
                answer = (False, error)
        requests.send_bytes(cloudpickle.dumps(answer))
    for child in children.values():
        child.kill()
    os._exit(0)


@contextlib.contextmanager
def _received(requests: Connection, count: int) -> Iterator[list[int]]:
    handles = [recv_handle(requests) for _ in range(count)]
    try:
        yield handles
    finally:
        for handle in handles:
            os.close(handle)


def _answer(
    request: Any, handles: Sequence[int], requests: Connection, children: dict[int, BaseProcess]
) -> int | None:
    kind, *rest = request
    if kind == "exit code":
        child = children[rest[0]]
        if child.exitcode is not None:
            del children[rest[0]]
        return child.exitcode
    (environ, folder, sys.path[:]), work = rest
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    # Once for all processes of this test and of later ones: torch's compiler, two seconds, which
    # checkpoints and symbolic shapes load, and below the modules of the test.
    importlib.import_module("torch._dynamo")
    first, target, args, calls, filters = cloudpickle.loads(work)
    first()
    child = multiprocessing.get_context("fork").Process(
        target=_begin,
        args=(target, args, handles),
        kwargs={"calls": calls, "filters": filters, "requests": requests},
    )
    child.start()
    assert child.pid is not None
    children[child.pid] = child
    return child.pid


def _begin(
    target: Callable[..., Any],
    args: Sequence[Any],
    handles: Sequence[int],
    *,
    calls: Sequence[Any],
    filters: Sequence[Any],
    requests: Connection,
) -> None:
    """Do a process's work."""
    begin_fork()
    requests.close()
    Server.own = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, handle in enumerate(handles[:2], start=1):
        os.dup2(handle, number)
        os.close(handle)
    warnings.filters[:] = filters
    Patches.repeat(calls)
    target(*handles[2:], *args)
