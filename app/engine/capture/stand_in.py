"""CPU stand-in for CUDA graphs: a replay reruns the work, on the memory of its first run.

Outputs and autograd's saved tensors lie in blocks of pools that behave as those of CUDA graphs: a
block is free as soon as its first tensor is freed, later recordings reuse it, and a replay
overwrites the same blocks whatever they hold by then. Blocks free at the start of a recording may
be its scratch memory, so every run fills them with NaN first. A plan that lets two tensors share
memory at the wrong time thus gives wrong numbers here as on a GPU.
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
    """Memory of one tensor: its bytes, type, shape and strides."""

    memory: np.ndarray
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def tensor(self, memory: np.ndarray | None = None) -> Tensor:
        """Return the tensor in this memory; it keeps `memory`, a view of the block, alive."""
        flat = torch.from_numpy(self.memory if memory is None else memory).view(self.dtype)
        return flat.as_strided(self.size, self.stride)


@dataclass(slots=True)
class Pool:
    """Free blocks by size; the last one freed is the first reused."""

    free: defaultdict[int, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    bytes: int = 0  # of all blocks, free or not

    def hold(self, value: Tensor) -> tuple[Allocation, Tensor]:
        """Copy a value to a block that becomes free when the copy is freed."""
        value = value.detach()
        axes = zip(value.stride(), value.shape, strict=True)
        spread = any(step == 0 for step, length in axes if length > 1)
        # keep the strides: the rounding of a GEMM depends on the layout of its operands
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
    """Blocks of autograd's saved tensors of one recording: n-th tensor in the n-th block."""

    pool: Pool
    allocations: list[Allocation | None] = field(default_factory=list)
    scratch: list[np.ndarray] = field(default_factory=list)  # free blocks it may use
    place: int = 0
    learnt: bool = False

    def __post_init__(self) -> None:
        self.scratch = [memory for allocations in self.pool.free.values() for memory in allocations]

    def pack(self, saved: Tensor) -> Tensor:
        """Copy a saved tensor to its block; parameters are not copied."""
        if saved.is_leaf and saved.requires_grad:
            allocation = None
            kept = saved
        elif self.learnt:
            allocation = self.allocations[self.place]
            assert allocation is not None, "a rerun saves the same tensors"
            kept = allocation.tensor().copy_(saved.detach())
        else:
            allocation, kept = self.pool.hold(saved)
        if not self.learnt:
            self.allocations.append(allocation)
        self.place += 1
        return kept

    def run(self, work: Work) -> Sequence[Tensor]:
        """Run `work` with autograd's saved tensors copied to fixed blocks."""
        self.place = 0
        for memory in self.scratch:
            memory.fill(0xFF)  # NaN in every float type
        with saved_tensors_hooks(self.pack, lambda kept: kept):
            done = work()
        self.learnt = True
        return done


@dataclass(slots=True)
class HostRecording:
    """Recorded work and the blocks of its outputs."""

    work: Work
    kept: Kept
    allocations: Sequence[Allocation]

    @classmethod
    def of(cls, work: Work, pool: Pool) -> tuple[HostRecording, Sequence[Tensor]]:
        """Run the work once; returns the recording, and outputs that own their memory."""
        kept = Kept(pool)
        held = [pool.hold(value) for value in kept.run(work)]
        outputs = [tensor for _, tensor in held]
        return cls(work, kept, [allocation for allocation, _ in held]), outputs

    def replay(self) -> Sequence[Tensor]:
        """Rerun the work; its outputs overwrite those of the run before."""
        done = self.kept.run(self.work)
        return [
            static.copy_(value.detach()) for static, value in zip(self.outputs, done, strict=True)
        ]

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors in the blocks of the outputs."""
        return [allocation.tensor() for allocation in self.allocations]

    def release(self) -> None:
        """Drop the work; a later replay raises AssertionError."""
        self.work = _released


def _released() -> Sequence[Tensor]:
    raise AssertionError("a recording was replayed after its release")


@dataclass(slots=True)
class HostRecorder:
    """Recorder on a CPU: a replay reruns the function on the same memory."""

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
        """Run and record the work; see the protocol."""
        with self.recording_into(pool) as memory:
            recording, outputs = HostRecording.of(work, memory)
        self.recordings.append(recording)
        return recording, outputs

    @contextmanager
    def recording_into(self, pool: int) -> Iterator[Pool]:
        """Yield a pool and count the time within the block; see the protocol."""
        since = time.perf_counter()
        yield self.pools[pool]
        self.seconds += time.perf_counter() - since

    def release(self) -> None:
        """Destroy every recording."""
        for recording in self.recordings:
            recording.release()
        self.recordings.clear()
