"""Recording where there is no GPU: a replay does the work again, on the memory of the first time.

Outputs, and what autograd keeps, lie in blocks of pools that behave as those of CUDA graphs do: a
block is free as soon as its first tenant is gone, later recordings take it over, and a replay
writes to the same blocks whoever lives there now. What is free when a recording begins may serve it
as scratch memory, so every run of it fills that with NaN first. So a plan that lets two tensors
share memory at the wrong time gives wrong numbers here as there.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from app.engine.capture.recorder import Graph, Recording, Work
from app.engine.capture.static import StaticMemory


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of one tensor: its bytes, and how it is read."""

    memory: np.ndarray
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, memory: np.ndarray | None = None) -> Tensor:
        """The tensor that lies there; it lives as long as `memory`, a view of the block, is to."""
        flat = torch.from_numpy(self.memory if memory is None else memory).view(self.dtype)
        return flat.as_strided(self.size, self.stride)


@dataclass(slots=True)
class Pool:
    """Blocks by size; the last one to become free is the first to be used again."""

    free: defaultdict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    bytes: int = 0  # of all blocks, free or not

    def hold(self, value: Tensor) -> tuple[Allocation, Tensor]:
        """A copy of a value in a block that is free again when the copy is gone."""
        value = value.detach()
        axes = zip(value.stride(), value.shape, strict=True)
        spread = any(step == 0 for step, length in axes if length > 1)
        # the same strides: how a matrix product rounds depends on its operands' layout
        stride = value.contiguous().stride() if spread else value.stride()
        last = sum(step * (length - 1) for step, length in zip(stride, value.shape, strict=True))
        size = (last + 1) * value.element_size() if value.numel() else 0
        free = self.free[size]
        if not free:
            free.append(torch.empty(size, dtype=torch.uint8).numpy())  # aligned as torch's own
            self.bytes += size
        memory = free.pop()
        view = memory[:]
        weakref.finalize(view, free.append, memory).atexit = False
        allocation = Allocation(memory, value.dtype, value.shape, stride=stride)
        return allocation, allocation.tensor(view).copy_(value)


@dataclass(slots=True)
class Kept:
    """Where autograd keeps what it needs of one piece of work: n-th tensor in the n-th block."""

    pool: Pool
    allocations: list[Allocation | None] = field(default_factory=list)
    scratch: list[np.ndarray] = field(default_factory=list)  # what the work may write to besides
    place: int = 0
    learnt: bool = False

    def __post_init__(self) -> None:
        self.scratch = [memory for allocations in self.pool.free.values() for memory in allocations]

    def pack(self, saved: Tensor) -> Tensor:
        """Put a tensor away; parameters stay where they are."""
        if saved.is_leaf and saved.requires_grad:
            allocation = None
            kept = saved
        elif self.learnt:
            allocation = self.allocations[self.place]
            assert allocation is not None, "the same work keeps the same tensors"
            kept = allocation.tensor().copy_(saved.detach())
        else:
            allocation, kept = self.pool.hold(saved)
        if not self.learnt:
            self.allocations.append(allocation)
        self.place += 1
        return kept

    def run(self, work: Work) -> Sequence[Tensor]:
        """Run `work`, with what autograd saves of it copied to fixed blocks."""
        self.place = 0
        for memory in self.scratch:
            memory.fill(0xFF)  # NaN in every float type
        with saved_tensors_hooks(self.pack, lambda kept: kept):
            done = work()
        self.learnt = True
        return done


@dataclass(slots=True)
class HostRecording:
    """Work, and where its results go."""

    work: Work
    kept: Kept
    allocations: Sequence[Allocation]

    @classmethod
    def of(cls, work: Work, pool: Pool) -> tuple[HostRecording, Sequence[Tensor]]:
        """Do the work once: the recording, and outputs that own their memory."""
        kept = Kept(pool)
        held = [pool.hold(value) for value in kept.run(work)]
        outputs = [tensor for _, tensor in held]
        return cls(work, kept, [allocation for allocation, _ in held]), outputs

    def replay(self) -> Sequence[Tensor]:
        """Run the work again; its results overwrite those of the last time."""
        done = self.kept.run(self.work)
        return [
            static.copy_(value.detach()) for static, value in zip(self.outputs, done, strict=True)
        ]

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors in the blocks that hold the results."""
        return [allocation.tensor() for allocation in self.allocations]

    def release(self) -> None:
        """Drop the work; a replay from here on is an AssertionError."""
        self.work = _released


def _released() -> Sequence[Tensor]:
    raise AssertionError("a recording was replayed after its release")


@dataclass(slots=True)
class HostRecorder:
    """The recorder on a CPU: a replay runs the function again on the same memory."""

    pools: defaultdict[int, Pool] = field(default_factory=lambda: defaultdict(Pool))
    recordings: list[Graph] = field(default_factory=list)
    static: StaticMemory = field(default_factory=StaticMemory)
    seconds: float = 0.0
    object_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        """Bytes of the blocks of all pools."""
        return sum(pool.bytes for pool in self.pools.values())

    def record(self, work: Work, pool: int) -> tuple[Recording, Sequence[Tensor]]:
        """Do the work; see the protocol."""
        with self.recording_into(pool) as memory:
            recording, outputs = HostRecording.of(work, memory)
        self.recordings.append(recording)
        return recording, outputs

    @contextmanager
    def recording_into(self, pool: int) -> Iterator[Pool]:
        """See the protocol."""
        since = time.perf_counter()
        yield self.pools[pool]
        self.seconds += time.perf_counter() - since

    def release(self) -> None:
        """Give up every recording."""
        for recording in self.recordings:
            recording.release()
        self.recordings.clear()
