"""Generations of a run's ranks: each begins with a meeting of all, and ends when a rank comes to
the next one.

Every arrival at a meeting is counted in the launcher's store, which outlives ranks. Rank 0 tells
the count of those who met; a thread of each rank compares. More arrivals mean that a rank was
started again, or that one has lost its connections: the generation is over, and the thread closes
the connections of its rank, so that a collective under way raises.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from app.engine.ranks.lost import CLOSED
from app.engine.ranks.meeting import TIMEOUT
from app.errors import warn

LOOK_S = 0.2  # seconds between looks at the count of arrivals
POLL_S = 0.02  # seconds between looks at a meeting
CONNECT_S = 1.0  # seconds for a listener of this process to take a connection
LEAVE_S = 120.0  # seconds for a rank to leave a generation that is over
GRACE_S = 0.5  # seconds for a rank's own error to say more than that its connections were closed
FILES = Path("/proc/self/fd")
# Texts of errors by which gloo, NCCL and torch's store tell of a process at the other end.
LOST = (*CLOSED, "closed by peer", "reset by peer", "Connection refused", "gloo", "NCCL")


class EndedError(RuntimeError):
    """The other ranks have ended the run, with this exit code; None: the launcher has ended."""

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code


class LostRankError(RuntimeError):
    """A rank of this generation has died; what was computed since is void."""


class Generations:
    """Meetings of this rank with the others. `connect` opens a connection to the launcher's store,
    in which keys are this program's own.
    """

    def __init__(self, rank: int, world_size: int, connect: Callable[[], dist.Store]) -> None:
        self.rank = rank
        self.world_size = world_size
        self._connect = connect
        self._counts = connect()  # used by one thread at a time
        self.met = 0  # meetings of this process
        self.over = threading.Event()  # set once another rank has come to a later meeting
        self._end = threading.Event()
        self._left = threading.Event()  # set once this generation has been left
        self._thread: threading.Thread | None = None
        self._before: set[int] = set()  # sockets from before this generation
        self._ours: set[int] | None = None  # sockets of its groups; None: all that are newer

    def begin(self) -> dist.Store:
        """Meet all ranks; return a store for them alone. Raises EndedError if the others have ended
        the run or the launcher with the store has, and TimeoutError if some do not come.
        """
        self._left.set()
        if self.met:
            self._check_store()
        self._before = {*_sockets(), *_listeners()}
        self._ours = None
        self.over.clear()
        store = self._connect()
        own = store.add(f"arrived/{self.rank}", 1)
        store.add("arrivals", 1)
        part, arrivals = self._lead(store, own) if self.rank == 0 else self._follow(store, own)
        self.met += 1
        self._end, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._look, args=(arrivals, self._end), daemon=True, name="arrivals"
        )
        self._thread.start()
        return dist.PrefixStore(part, store)

    def settle(self) -> None:
        """Count the connections up to now, and no later ones, as those of the groups."""
        self._ours = set(_sockets()) - self._before

    def end_run(self, code: int) -> None:
        """Tell a rank that comes later that this rank is about to exit with this code."""
        self._stop()
        self._left.set()
        with suppress(RuntimeError):  # the store is gone, and with it whoever would ask
            self._counts.set("ended", str(code))

    def leave(self) -> None:
        """Close the connections of this generation, which wakes the ranks at their other ends, and
        drop its groups.
        """
        self._expect_to_leave()
        self._stop()
        self._wake()
        with suppress(Exception):
            if dist.is_initialized() and dist.get_backend() == "nccl":
                _abort_nccl()
                c10d._abort_process_group()
        with suppress(Exception):
            if dist.is_initialized():
                dist.destroy_process_group()
        # torch names groups by their number, the same on all ranks. Groups that could not connect
        # have been counted here, but not on a rank that has just been started.
        c10d._world.group_count = 0
        self._left.set()

    def check(self) -> None:
        """Raise LostRankError if the generation is over."""
        if self.over.is_set():
            raise LostRankError("a rank of this run has died")

    def is_cause(self, error: BaseException) -> bool:
        """Return whether an error of this rank comes from the death of another one."""
        if isinstance(error, EndedError | TimeoutError | torch.OutOfMemoryError):
            return False
        told = isinstance(error, RuntimeError) and any(each in str(error) for each in LOST)
        return told or (self.over.is_set() and isinstance(error, RuntimeError))

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look(self, arrivals: int, end: threading.Event) -> None:
        while not end.wait(LOOK_S):
            try:
                came = self._counts.add("arrivals", 0)
            except RuntimeError:  # the launcher is gone, and ends this process too
                return
            if came > arrivals:
                self.over.set()
                self._expect_to_leave()
                break
        wait = GRACE_S
        while not end.wait(wait):  # again and again: a rank may still open connections
            self._wake()
            _abort_nccl()
            wait = LOOK_S

    def _expect_to_leave(self) -> None:
        """Have this process killed, and thus started again, if it does not leave within LEAVE_S: an
        abort or a collective may never return, and the other ranks wait for this one.
        """
        thread = threading.Thread(target=_kill_unless, args=(self._left,), daemon=True, name="left")
        thread.start()

    def _wake(self) -> None:
        """Shut down this generation's connections, those too that have not been made yet.

        While its groups connect, gloo waits at a listener for each rank that is to connect to it,
        also for one that has died, and nothing but a connection ends that: so it gets one.
        """
        if self._ours is None:
            for inode, address in _listeners().items():
                if inode not in self._before:
                    _connect_all(address, self.world_size)
        for inode, number in _sockets().items():
            newer = inode not in self._before
            if newer and (self._ours is None or inode in self._ours):
                with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                    end.shutdown(socket.SHUT_RDWR)

    def _lead(self, store: dist.Store, own: int) -> tuple[str, int]:
        """Draw a prefix, and tell it all others until each has answered; then tell the arrivals."""
        part = uuid.uuid4().hex
        answered: dict[int, int] = {0: own}
        for _ in _patiently(f"of {self.world_size} ranks, some have not come"):
            self._check_end(store)
            for rank in range(self.world_size):
                if rank not in answered and store.check([f"here/{rank}"]):
                    store.set(store.get(f"here/{rank}").decode(), part)
                if rank not in answered and store.check([f"{part}/{rank}"]):
                    answered[rank] = int(store.get(f"{part}/{rank}"))
            if len(answered) == self.world_size:
                break
        arrivals = sum(answered.values())
        store.set(f"{part}/arrivals", str(arrivals))
        return part, arrivals

    def _follow(self, store: dist.Store, own: int) -> tuple[str, int]:
        """Answer rank 0, also one that was started again meanwhile, until it tells the arrivals."""
        drawn = uuid.uuid4().hex
        store.set(f"here/{self.rank}", drawn)
        for _ in _patiently("rank 0 has not come"):
            self._check_end(store)
            if not store.check([drawn]):
                continue
            part = store.get(drawn).decode()
            store.set(f"{part}/{self.rank}", str(own))
            if store.check([f"{part}/arrivals"]):
                return part, int(store.get(f"{part}/arrivals"))
        raise AssertionError("waits until it returns or raises")

    def _check_store(self) -> None:
        """Raise EndedError if the store is gone: a new connection would wait for another one."""
        try:
            self._counts.add("arrivals", 0)
        except RuntimeError:
            raise EndedError("the launcher that keeps the store of the ranks has ended") from None

    def _check_end(self, store: dist.Store) -> None:
        if store.check(["ended"]):
            code = int(store.get("ended"))
            raise EndedError("the other ranks have ended the run", code)


def _kill_unless(left: threading.Event) -> None:
    if not left.wait(LEAVE_S):
        warn(f"a rank has died, and this one has not left its collectives within {LEAVE_S:.0f} s")
        os.kill(os.getpid(), signal.SIGKILL)


def _patiently(what: str) -> Iterator[None]:
    since = time.monotonic()
    while time.monotonic() - since < TIMEOUT.total_seconds():
        yield
        time.sleep(POLL_S)
    raise TimeoutError(f"{what} within {TIMEOUT}")


def _open_tcp() -> Iterator[tuple[int, int, socket.socket]]:
    """Yield the TCP sockets of this process: inode, file descriptor, and a duplicate."""
    for entry in FILES.iterdir():
        with suppress(OSError, ValueError):
            name = os.readlink(entry)
            if name.startswith("socket:["):
                with socket.socket(fileno=os.dup(int(entry.name))) as end:
                    if end.family in (socket.AF_INET, socket.AF_INET6):
                        yield int(name[8:-1]), int(entry.name), end


def _sockets() -> dict[int, int]:
    """Return the TCP connections of this process: inode -> file descriptor."""
    return {inode: number for inode, number, end in _open_tcp() if not _listens(end)}


def _listeners() -> dict[int, tuple[str, int]]:
    """Return where this process listens for TCP connections: inode -> host and port."""
    return {inode: end.getsockname()[:2] for inode, _, end in _open_tcp() if _listens(end)}


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _connect_all(address: tuple[str, int], count: int) -> None:
    """Connect to a listener of gloo as each of the `count` ranks that it may wait for, and close.

    A connection begins with the number that the listener has given a rank: 0, 1, … (gloo's
    transport/tcp/listener.cc).
    """
    for number in range(count):
        with suppress(OSError), socket.create_connection(address, CONNECT_S) as end:
            end.sendall(struct.pack("@n", number))


def _abort_nccl() -> None:
    """Abort NCCL's communicators, whose kernels would wait forever; from any thread."""
    backends = []
    for group in list(c10d._world.pg_map):
        with suppress(Exception):  # one of gloo, or of one rank
            backend = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                backends.append(backend)
    abort_together(backends)


def abort_together(backends: Sequence[Any]) -> None:
    """Abort all of them at once; return when every abort has returned.

    An abort waits for the device, also for kernels of communicators that have not been aborted, so
    that aborts in sequence can deadlock (https://github.com/NVIDIA/nccl/issues/1013). NCCL's own
    group calls do not help: torch runs each abort in a thread of its own, outside of the group.
    """
    threads = [
        threading.Thread(target=_abort, args=(each,), daemon=True, name="abort")
        for each in backends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _abort(backend: Any) -> None:
    with suppress(Exception):
        backend.abort()
