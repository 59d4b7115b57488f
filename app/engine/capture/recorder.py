"""Record work on the GPU as a CUDA graph, so that one launch repeats all its kernels.

A recording allocates from a memory pool. Later recordings reuse the memory of a tensor as soon as
it is freed, as outside of graphs; so recordings that share a pool must replay in the order in
which they were made. A recording keeps none of its outputs alive: it stores their addresses, and
returns tensors that do not own their memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from app.engine.capture.static import StaticMemory
from app.torch_versions import captured_on_current_stream, unowned

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Work = Callable[[], Sequence[Tensor]]


class Graph(Protocol):
    """Recorded work of any origin, ours or a library's."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Tensors at the outputs' addresses; they do not own their memory."""

    def release(self) -> None:
        """Destroy the graph; it cannot be replayed any more."""


class Recording(Graph, Protocol):
    """Recorded work that can be replayed."""

    def replay(self) -> Sequence[Tensor]:
        """Rerun the work on the same memory; the outputs do not own theirs."""


class Recorder(Protocol):
    """Capture work once, for replay on the same memory."""

    # all graphs, also those captured by a library, in order of capture
    recordings: list[Graph]
    static: StaticMemory  # static buffers, outside the pools
    seconds: float  # capture time in all
    object_bytes: int  # driver memory of the graphs themselves

    @property
    def pool_bytes(self) -> int:
        """Bytes of all memory pools."""

    def record(self, work: Work, pool: int) -> tuple[Recording, Sequence[Tensor]]:
        """Record and run the work once; returns the recording and outputs that own their memory."""

    def recording_into(self, pool: int) -> AbstractContextManager[object]:
        """Yield the handle of a pool, and count captures within the block in seconds and bytes.

        Also for a library that captures graphs itself.
        """

    def release(self) -> None:
        """Destroy every recording."""


@dataclass(slots=True)
class CudaRecording:
    """CUDA graph and its outputs, which do not own their memory."""

    graph: torch.cuda.CUDAGraph
    outputs: Sequence[Tensor]

    def replay(self) -> Sequence[Tensor]:
        """Launch the graph on the current stream."""
        self.graph.replay()
        return self.outputs

    def release(self) -> None:
        """Destroy the graph."""
        self.graph.reset()


@dataclass(slots=True)
class CudaRecorder:
    """Recorder on the current stream, which must not be the default one."""

    pools: dict[int, _POOL_HANDLE] = field(default_factory=dict)  # our number -> torch's handle
    recordings: list[Graph] = field(default_factory=list)
    static: StaticMemory = field(default_factory=StaticMemory)
    seconds: float = 0.0
    object_bytes: int = 0

    def record(self, work: Work, pool: int) -> tuple[Recording, Sequence[Tensor]]:
        """Capture and launch the work once. Ends the capture before passing on an error."""
        with self.recording_into(pool) as handle:
            graph = torch.cuda.CUDAGraph()
            with _no_garbage_collection():
                # thread_local: other threads, as NCCL's watchdog, may make calls that are illegal
                # during capture.
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    with suppress(RuntimeError):  # repeats that the capture failed
                        graph.capture_end()
                    raise
                graph.capture_end()
            recording = CudaRecording(graph, [unowned(output) for output in outputs])
            self.recordings.append(recording)
            graph.replay()  # a capture only records: this does the work of the present step
        return recording, outputs

    @contextmanager
    def recording_into(self, pool: int) -> Iterator[_POOL_HANDLE]:
        """Yield a pool's handle and count captures within the block; see the protocol."""
        since = time.perf_counter()
        if pool not in self.pools:
            self.pools[pool] = torch.cuda.graph_pool_handle()
            gc.collect()  # so that dead tensors in cycles are freed before the cache is emptied
            torch.cuda.empty_cache()  # the pool cannot use blocks cached by eager steps
        before = _taken_by_driver()
        with captured_on_current_stream():
            yield self.pools[pool]
        self.object_bytes += max(0, _taken_by_driver() - before)
        self.seconds += time.perf_counter() - since

    @property
    def pool_bytes(self) -> int:
        """Bytes that the allocator has reserved for all pools."""
        ours = set(self.pools.values())
        return sum(
            part["total_size"]
            for part in torch.cuda.memory_snapshot()
            if tuple(part["segment_pool_id"]) in ours
        )

    def release(self) -> None:
        """Destroy every graph, before the process groups whose communicators they hold."""
        for recording in self.recordings:
            recording.release()
        self.recordings.clear()
        self.pools.clear()
        self.object_bytes = 0


def _taken_by_driver() -> int:
    """Return the bytes of GPU memory in use outside torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: freeing CUDA objects is illegal during capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
