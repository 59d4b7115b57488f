"""Recording work on the GPU as a CUDA graph, so that one launch repeats all of its kernels.

What a recording allocates lies in a pool. Memory there is free for the recordings that follow as
soon as its tensor is gone, as outside of graphs; so recordings that share a pool must replay in the
order in which they were made. A recording itself keeps none of its outputs alive: it knows where
they lie, and hands out tensors that do not own their memory.
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
    """Work that can be repeated, by whoever has recorded it."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Where the results of the last time lie; these tensors do not own their memory."""

    def release(self) -> None:
        """Give it up; it cannot be replayed any more."""


class Recording(Graph, Protocol):
    """Work that a recorder can repeat."""

    def replay(self) -> Sequence[Tensor]:
        """Do it again on the same memory; the outputs do not own theirs."""


class Recorder(Protocol):
    """Captures work once, so that it can be replayed on the same memory."""

    # all of them, also those of others, in the order in which they were made
    recordings: list[Graph]
    static: StaticMemory  # what recordings read that lies outside of the pools
    seconds: float  # that recording has taken
    object_bytes: int  # that the driver has taken for recordings

    @property
    def pool_bytes(self) -> int:
        """Bytes of the memory pools in which recordings compute."""

    def record(self, work: Work, pool: int) -> tuple[Recording, Sequence[Tensor]]:
        """Do the work once, and keep how: the recording, and outputs that own their memory."""

    def recording_into(self, pool: int) -> AbstractContextManager[object]:
        """What is recorded within the block, by whomever, is recorded into a pool, whose handle is
        given, and is counted in seconds and bytes.
        """

    def release(self) -> None:
        """Give up every recording."""


@dataclass(slots=True)
class CudaRecording:
    """A CUDA graph and where its outputs lie."""

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
    """Records on the current stream, never the default one, and on those that join it."""

    pools: dict[int, _POOL_HANDLE] = field(default_factory=dict)  # our number -> torch's handle
    recordings: list[Graph] = field(default_factory=list)
    static: StaticMemory = field(default_factory=StaticMemory)
    seconds: float = 0.0
    object_bytes: int = 0

    def record(self, work: Work, pool: int) -> tuple[Recording, Sequence[Tensor]]:
        """Capture and launch the work once. Raises what it raises, after ending the capture."""
        with self.recording_into(pool) as handle:
            graph = torch.cuda.CUDAGraph()
            with _no_garbage_collection():
                # Other threads, such as those that watch over collectives, may go on with what a
                # capture forbids.
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                try:
                    outputs = work()
                except BaseException:
                    with suppress(RuntimeError):  # it says once more that the capture has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
            recording = CudaRecording(graph, [unowned(output) for output in outputs])
            self.recordings.append(recording)
            graph.replay()
        return recording, outputs

    @contextmanager
    def recording_into(self, pool: int) -> Iterator[_POOL_HANDLE]:
        """See the protocol."""
        since = time.perf_counter()
        if pool not in self.pools:
            self.pools[pool] = torch.cuda.graph_pool_handle()
            gc.collect()
            torch.cuda.empty_cache()  # what eager steps leave cached, the pool is going to need
        before = _taken_by_driver()
        with captured_on_current_stream():
            yield self.pools[pool]
        self.object_bytes += max(0, _taken_by_driver() - before)
        self.seconds += time.perf_counter() - since

    @property
    def pool_bytes(self) -> int:
        """Memory that the allocator has reserved for all pools."""
        ours = set(self.pools.values())
        return sum(
            part["total_size"]
            for part in torch.cuda.memory_snapshot()
            if tuple(part["segment_pool_id"]) in ours
        )

    def release(self) -> None:
        """Destroy every graph: before the process groups whose communicators they hold."""
        for recording in self.recordings:
            recording.release()
        self.recordings.clear()
        self.pools.clear()
        self.object_bytes = 0


def _taken_by_driver() -> int:
    """Bytes of the GPU that are in use, but not by torch's allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection under capture might destroy something that the driver then refuses to."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
