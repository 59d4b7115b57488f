"""Time and memory of one rank by kind of work, from what it notes as it goes."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.engine.watchdog.watchdog import Watchdog

FORWARD, BACKWARD, UPDATE, OTHER = "forward", "backward", "update", "other"
MADE_UP = "made-up messages"
KINDS = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD}
BEFORE, AFTER = "forwards and backwards of a step", "the end of the step"


class WorkClock:
    """Marks of when a kind of work begins; on a GPU events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[tuple[str, Any]] = []  # Any: seconds, or an event

    def mark(self, kind: str) -> None:
        """Begin this kind of work; no-op while a graph is captured."""
        if self.device.type != "cuda":
            self.marks.append((kind, time.perf_counter()))
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((kind, event))

    @contextmanager
    def made_up(self) -> Iterator[None]:
        """Count the block as work that stands for a message."""
        before = self.marks[-1][0] if self.marks else OTHER
        self.mark(MADE_UP)
        yield
        self.mark(before)

    def seconds(self) -> Counter[str]:
        """Return the seconds of each kind since the last call; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = Counter[str]()
        for (kind, began), (_, ended) in zip(self.marks, self.marks[1:], strict=False):
            found[kind] += (
                ended - began
                if self.device.type != "cuda"
                else max(0.0, began.elapsed_time(ended) / 1e3)
            )
        self.marks.clear()
        return found


@dataclass(slots=True)
class Noting(Watchdog):
    """Watchdog without other ranks, which passes on what this one does."""

    clock: WorkClock | None = None
    meter: TensorMeter | None = None

    def note(self, doing: str) -> None:
        """See `Watchdog`."""
        Watchdog.note(self, doing)
        kind = UPDATE if doing in (BEFORE, AFTER) else KINDS.get(doing[0], OTHER)
        if self.clock is not None:
            self.clock.mark(kind)
        if self.meter is not None:
            self.meter.look(after=doing == AFTER)

    def step(self, doing: str) -> None:
        """See `Watchdog`."""
        self.note(doing)

    def rest(self, doing: str = "") -> None:
        """See `Watchdog`."""
        Watchdog.rest(self, doing)
        if self.clock is not None:
            self.clock.mark(OTHER)


class TensorMeter:
    """Bytes of tensors between the actions of a step, and at its peaks."""

    def __init__(self, device: torch.device, alive: Alive | None) -> None:
        self.device, self.alive = device, alive
        # bytes that others hold
        self.before = 0 if alive is not None else torch.cuda.memory_allocated(device)
        self.saved = 0  # most between actions
        self.passes = 0  # most within forwards and backwards

    def live(self) -> int:
        """Return the bytes of all tensors now."""
        if self.alive is not None:
            return self.alive.count()
        return int(torch.cuda.memory_allocated(self.device)) - self.before

    def peak(self) -> int:
        """Return the most bytes of tensors since the last `reset`."""
        if self.alive is not None:
            return self.alive.peak
        return int(torch.cuda.max_memory_allocated(self.device)) - self.before

    def reset(self) -> None:
        """Forget earlier peaks."""
        if self.alive is not None:
            self.alive.peak = self.alive.live
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self, after: bool) -> None:
        """Note the memory between two actions; `after`: the last one of the step."""
        self.saved = max(self.saved, self.live())
        if after:
            self.passes = max(self.passes, self.peak())


class Alive(TorchDispatchMode):
    """Bytes of all storages in host memory made within the block that are still there, and their
    peak. Not counted: `known` tensors, and what an operation is given that none has made, as
    gloo's own copies of what it sends.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in known:
            self._note(tensor.untyped_storage(), 0)

    def count(self) -> int:
        """Return the bytes now, less those of storages that were freed in place."""
        for key, found in list(self.storages.items()):
            storage = found()
            if storage is not None and storage.nbytes() < self.sizes[key]:
                self.live -= self.sizes[key] - storage.nbytes()
                self.sizes[key] = storage.nbytes()
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count((args, kwargs), made=False)
        out = func(*args, **(kwargs or {}))
        self._count(out, made=True)
        return out

    def _count(self, tensors: Any, made: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._note(storage, storage.nbytes() if made else 0)

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = size
            self.storages[key] = weakref.ref(storage)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self.sizes.pop(key)
        del self.storages[key]
