"""Full-iteration CUDA graph: all forwards, backwards, P2P and gradient reductions of a step.

With `cuda_graph.optimizer` the graph also holds the update.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from app.engine.capture.recorder import Recorder, Recording
from app.engine.capture.tree import Rebuild, flatten

Given = TypeVar("Given")  # frozen records with tensors
Found = TypeVar("Found")


@dataclass(slots=True)
class FullIteration(Generic[Given, Found]):
    """`work` on a step's input, recorded at its first call and then replayed.

    `in_graph` is entered around the recording and around every replay, for host state that both
    need; the host runs the work itself only once. The next call overwrites what the work returned.
    """

    work: Callable[[Given], Found]
    in_graph: Callable[[], AbstractContextManager[None]]
    recorder: Recorder
    pool: int = 0
    recording: Recording | None = None
    input: Given | None = None
    rebuild: Rebuild[Found] | None = None

    def __call__(self, step: Given) -> Found:
        """Copy in a step's input and run the work."""
        with self.in_graph():
            return self._record_or_replay(step)

    def _record_or_replay(self, step: Given) -> Found:
        # The recording is gone if the recorder was released, as when memory grows: record again.
        if any(known is self.recording for known in self.recorder.recordings):
            assert self.recording is not None
            self._load(step)
            return self._rebuilt(self.recording.replay())
        tensors, rebuild = flatten(step)
        buffers = (self.recorder.static.buffer(self.pool, nth) for nth in itertools.count())
        places = zip(buffers, tensors, strict=False)  # `buffers` is infinite
        self.input = rebuild([buffer(tensor).copy_(tensor) for buffer, tensor in places])
        self.recording, outputs = self.recorder.record(self._run, self.pool)
        return self._rebuilt(outputs)

    def _rebuilt(self, outputs: Sequence[Tensor]) -> Found:
        assert self.rebuild is not None, "known since the recording"
        return self.rebuild(outputs)

    def _load(self, step: Given) -> None:
        for static, value in zip(flatten(self.input)[0], flatten(step)[0], strict=True):
            static.copy_(value)

    def _run(self) -> list[Tensor]:
        assert self.input is not None
        outputs, self.rebuild = flatten(self.work(self.input))
        return outputs
