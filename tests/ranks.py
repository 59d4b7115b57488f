"""A process that runs functions as ranks of gloo worlds, one after another.

Between two calls it puts back what a function may change: environment variables, working folder,
signal handlers, standard output, torch's settings and random states. Where it finds what it cannot
put back, such as a patched class, a thread or a process group, it is not used again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from operator import is_
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist

# brings torch's compiler along, which every forked rank would load anew, two seconds each
from tests.forks import Patches, Process

TELL = signal.SIGQUIT  # a rank that gets it prints where it is
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
CLEANS_UP_S = 60  # seconds in which a process puts back what a call has changed
# outside of the project: what tests replace members of
PATCHED = (os, shutil, signal, socket, subprocess, tempfile, time, torch, torch.cuda, dist, Path)
GROWN = 400 << 20  # bytes after which a process is not used again


class Rank:
    """A process for calls, seen from the pytest process."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.end_here, end_there = Pipe()
        # with the function, so that the server loads its module, and all processes have it
        self.process = Process(
            serve, (fn,), handles=(end_there.fileno(),), repeats_patches=False, first=look
        )
        self.process.start()
        end_there.close()  # so that a process that dies closes its pipe
        self.answered = True  # and has nothing to do
        self.used = False

    def ask(
        self, fn: Callable[..., Any], rank: int, world_size: int, *, store: str, args: Any
    ) -> None:
        """Have it call `fn(rank, *args)` in a world that meets in a file."""
        self.answered, self.used = False, True
        calls = [call for patches in Patches.active for call in patches.calls]
        here = (dict(os.environ), os.getcwd(), sys.path[:], warnings.filters, calls)
        work = cloudpickle.dumps((here, fn, (rank, world_size, store), args))
        with contextlib.suppress(BrokenPipeError):  # the answer says so
            self.end_here.send_bytes(work)
            for output in (1, 2):
                send_handle(self.end_here, output, self.process.pid)

    def answer(self) -> tuple[bool, Any]:
        """Return whether the call returned, and its result or traceback. Raises EOFError if the
        process has died.
        """
        good, value = cloudpickle.loads(self.end_here.recv_bytes())
        self.answered = good
        return good, value

    def is_clean(self) -> bool:
        """Return whether it can serve another call; ends it if it cannot."""
        if not self.used:
            return True
        self.used = False
        with contextlib.suppress(EOFError, ConnectionError):
            if self.end_here.poll(CLEANS_UP_S) and cloudpickle.loads(self.end_here.recv_bytes()):
                return True
        self.end()
        return False

    def end(self) -> None:
        """End the process."""
        self.end_here.close()
        self.process.kill()
        self.process.join()


def serve(handle: int, fn: Callable[..., Any]) -> None:
    """Answer calls until the pytest process closes its end, or this one is not clean any more."""
    faulthandler.register(TELL, file=sys.__stderr__)
    with Connection(handle) as end:
        before, is_back = Before(), True
        while is_back:
            try:
                here, fn, (rank, world_size, store), args = cloudpickle.loads(end.recv_bytes())
            except (EOFError, ConnectionResetError):
                return
            for output in (1, 2):
                given = recv_handle(end)
                os.dup2(given, output)
                os.close(given)
            look()
            with _as_in(*here):
                _call(end, fn, rank, world_size=world_size, store=store, args=args)
            before.put_back()
            is_back = before.is_back()
            end.send_bytes(cloudpickle.dumps(is_back))


def _call(
    end: Connection, fn: Callable[..., Any], rank: int, *, world_size: int, store: str, args: Any
) -> None:
    try:
        files = dist.FileStore(store, world_size)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=world_size)
        joined = dist.PrefixStore("joined", files)
        joined.set(str(rank), "")
        answer = cloudpickle.dumps((True, fn(rank, *args)))
        # a rank that leaves earlier fails those that still connect to it
        joined.wait([str(other) for other in range(world_size)])
        end.send_bytes(answer)
        dist.destroy_process_group()
    except BaseException:
        end.send_bytes(cloudpickle.dumps((False, traceback.format_exc())))


@contextlib.contextmanager
def _as_in(
    environ: dict[str, str], folder: str, path: list[str], filters: Any, calls: Any
) -> Iterator[None]:
    """Take over what the pytest process has: variables, working folder, filters, patches."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.path[:] = path
    warnings.filters[:] = filters
    patches = Patches.repeat(calls)
    try:
        yield
    finally:
        patches.undo()


class Before:
    """What a call may change, as it was before the first one."""

    def __init__(self) -> None:
        self.threads = threading.active_count()
        self.size = _resident()
        self.streams = sys.stdout, sys.stderr
        self.handlers = {each: signal.getsignal(each) for each in SIGNALS}
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()
        self.ordered = torch.are_deterministic_algorithms_enabled()
        self.dtype = torch.get_default_dtype()

    def put_back(self) -> None:
        """Put back all but members of modules and classes."""
        sys.stdout, sys.stderr = self.streams
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])
        torch.set_rng_state(self.random[2])
        torch.use_deterministic_algorithms(self.ordered)
        torch.set_default_dtype(self.dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        gc.collect()

    def is_back(self) -> bool:
        """Return whether nothing is left of a call."""
        return (
            not dist.is_initialized()
            and threading.active_count() == self.threads
            and _resident() < self.size + GROWN
            and all(_same(vars(holder), known) for holder, known in MEMBERS.values())
        )


LOADED: dict[str, ModuleType] = {}  # modules whose members are noted
MEMBERS: dict[int, tuple[ModuleType | type, dict[str, Any]]] = {}


def look() -> None:
    """Note the members of modules and classes that were loaded since. The server of processes does
    it before it forks one, which then knows most of them.
    """
    new = {name: it for name, it in list(sys.modules.items()) if LOADED.get(name) is not it}
    LOADED.update(new)
    for holder in _holders(new) if new else ():
        if id(holder) not in MEMBERS:
            MEMBERS[id(holder)] = holder, dict(vars(holder))


def _holders(modules: Mapping[str, ModuleType]) -> Iterator[ModuleType | type]:
    yield from PATCHED
    for name, module in modules.items():
        if name.partition(".")[0] in ("app", "tests"):
            yield module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield value


def _same(now: Any, known: dict[str, Any]) -> bool:
    """Return whether all members are there that were known, unchanged."""
    return now.keys() >= known.keys() and all(map(is_, map(now.get, known), known.values()))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
