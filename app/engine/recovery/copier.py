"""Copy a rank's state to host memory and to its partner beside training."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from app.engine.checkpoint.load import Progress
from app.engine.checkpoint.save import current_state
from app.engine.files.names import part_name
from app.engine.ranks.groups import host_group
from app.engine.ranks.memory import memory_of
from app.engine.recovery.copies import Copies
from app.engine.step.engine import Engine
from app.errors import warn
from app.optim.frozen import digests
from app.plan.memory.overheads import MOST

JOIN_S = 60.0  # seconds for the thread to end once its connections are closed
LATE = 0.02  # of a step: a longer wait for copies is worth a warning


class Copier:
    """Copier of one engine's state: at most one copy is under way.

    The state must not change before the host has it. On a CPU `take` returns then. On a GPU shards
    are copied on a stream of its own, beside the passes of the next step, and the next update waits
    for them on the device; a captured update waits before its graph. Where the plan has room
    (`RankMemory.stages_copies`), shards are copied on the GPU first, and updates wait for that
    only. Sum and messages follow in a thread, over a process group of its own, so that they and
    training never wait for each other's collectives. The last update before the next `take` waits
    for them: without the copy, that step would be one more than may be lost.
    """

    def __init__(self, engine: Engine, copies: Copies, origin: Mapping[str, Any]) -> None:
        self.engine = engine
        self.copies = copies
        self._origin = origin
        self._group = host_group(list(range(dist.get_world_size())))
        self._left_out = digests(engine.frozen)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        cuda = engine.device.type == "cuda"
        self._side = torch.cuda.Stream(engine.device) if cuda else None
        planned, run = engine.plan.memory[engine.groups.pp_rank], engine.plan.run
        staged = planned.stages_copies and planned.total <= MOST * memory_of(run, engine.device)
        self.staged: dict[str, Tensor] | None = {} if staged else None  # the copy on the GPU
        self._read: torch.cuda.Event | None = None  # after it the shards may change
        # an update within a graph cannot wait for what is copied outside of it
        self._beside = not run.cuda_graph.optimizer
        self._due = False  # True in the last step before the next copy
        self._began = 0.0
        self.took = 0.0  # seconds of the last copy, until all ranks had theirs
        self.waited = 0.0  # seconds that the host has waited for copies
        if self._beside:
            engine.optimizer.changing = self._before_update

    def begin_step(self, due: bool) -> None:
        """Note that a step begins, and whether the next copy is `due` after it."""
        self._due = due
        if due and not self._beside:
            self.wait()

    def _before_update(self) -> None:
        if self._due:
            self.wait()
        self._wait_on_device()

    def take(self, progress: Progress, cursor: dict[str, Any]) -> None:
        """Begin a copy of the present state. All ranks call it, after the same step."""
        self.wait()
        self._began = time.monotonic()
        state = current_state(
            self.engine,
            self.engine.plan.run,
            progress,
            cursor,
            origin=self._origin,
            whole=True,
            left_out=self._left_out,
        )
        names = {name for name, _ in state.parts}
        assert len(names) == len(state.parts), "each parameter has one part on a rank"
        slot = self.copies.own[(self.copies.serial + 1) % 2]
        shards = self.engine.optimizer.param_shards()
        updated = {part_name(each.spec.name, key) for each in shards for key in each.state}
        done = self._copy(state.tensors, slot.lay_out(state), updated)
        self.copies.serial += 1
        self._thread = threading.Thread(
            target=self._send,
            args=(done, state.tensors),
            daemon=True,
            name="copies in memory",
        )
        self._thread.start()

    def _copy(
        self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor], updated: Collection[str]
    ) -> torch.cuda.Event | None:
        """Copy tensors to the host; return the event after which they are there, on a GPU.

        `updated`: names of those that only an update changes; passes may change the others.
        """
        for name in tensors.keys() - updated:
            into[name].copy_(tensors[name], non_blocking=True)
        if self._side is None:
            for name in updated:
                into[name].copy_(tensors[name])
            return None
        self._side.wait_stream(torch.cuda.current_stream(self.engine.device))
        with torch.cuda.stream(self._side):
            shards = {name: tensors[name] for name in updated}
            if self.staged is not None:
                shards = self._stage(shards)
            staged = torch.cuda.Event()
            staged.record()
            for name, shard in shards.items():
                into[name].copy_(shard, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self._read = done if self.staged is None else staged
        if not self._beside:
            self._wait_on_device()
        return done

    def _stage(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy shards on the GPU, into memory that is kept for the next copies; return the shards
        themselves, from then on, if there is no room.
        """
        assert self.staged is not None, "asked before"
        if not self.staged:
            try:
                self.staged = {name: torch.empty_like(shard) for name, shard in shards.items()}
            except torch.OutOfMemoryError:
                self.staged = None
                warn("the GPU has no room for a copy of the optimizer: updates wait for the host's")
                return dict(shards)
        for name, shard in shards.items():
            self.staged[name].copy_(shard)
        return self.staged

    def _wait_on_device(self) -> None:
        if self._read is not None:
            torch.cuda.current_stream(self.engine.device).wait_event(self._read)
            self._read = None

    def _send(self, done: torch.cuda.Event | None, read: dict[str, Tensor]) -> None:
        try:
            if done is not None:
                done.synchronize()
            read.clear()  # until here the allocator must not give their memory to others
            slot = self.copies.own[self.copies.serial % 2]
            slot.crc = slot.sum()
            slot.serial = self.copies.serial
            self.copies.swap(self._group)
            self.took = time.monotonic() - self._began
        except Exception as error:  # raised again by `wait`
            self._error = error

    def wait(self) -> None:
        """Wait until all ranks have the copy under way. Raises what its sending raised."""
        if self._thread is not None:
            self.engine.watchdog.rest("waiting for the copies in memory")
            began = time.monotonic()
            self._thread.join()
            self.waited += time.monotonic() - began
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what the sending of a copy raised, if that has happened."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the thread, whose connections are closed, without its error."""
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None


def late_copies(every: int, step_s: float, *, waited_s: float, took_s: float) -> str | None:
    """Return a warning if ranks wait `waited_s` of the `step_s` seconds of a step for copies, which
    take `took_s` each, with checkpoint.memory_every=`every`; None if the wait is short.
    """
    if waited_s <= LATE * step_s:
        return None
    # the last step before a copy does not hide the one before it
    enough = max(2 * ceil(took_s / (step_s - waited_s)) + 2, every + 2)
    return (
        f"checkpoint.memory_every={every}: a step of {_text(step_s)} s waits {_text(waited_s)} s "
        f"of that for copies in memory; one takes {_text(took_s)} s, which "
        f"checkpoint.memory_every={enough} hides"
    )


def _text(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"
