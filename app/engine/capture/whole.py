"""One recording of a whole step: forwards, backwards, exchanges and reductions of all microbatches,
and with `cuda_graph.optimizer` the update behind them.
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
class WholeStep(Generic[Given, Found]):
    """`work` on a step's input, recorded when it is first called.

    `in_graph` is entered around a recording and around every replay: what it does on the host
    holds for both, while the work itself runs on the host only when it is recorded. What the work
    returns lies in memory that the next call writes to again.
    """

    work: Callable[[Given], Found]
    in_graph: Callable[[], AbstractContextManager[None]]
    recorder: Recorder
    pool: int = 0
    recording: Recording | None = None
    input: Given | None = None
    rebuild: Rebuild[Found] | None = None

    def __call__(self, step: Given) -> Found:
        """Take in a step's input, and do the work."""
        with self.in_graph():
            return self._record_or_replay(step)

    def _record_or_replay(self, step: Given) -> Found:
        if any(known is self.recording for known in self.recorder.recordings):
            assert self.recording is not None
            self._load(step)
            return self._whole(self.recording.replay())
        tensors, rebuild = flatten(step)
        buffers = (self.recorder.static.buffer(self.pool, nth) for nth in itertools.count())
        places = zip(buffers, tensors, strict=False)
        self.input = rebuild([buffer(tensor).copy_(tensor) for buffer, tensor in places])
        self.recording, outputs = self.recorder.record(self._run, self.pool)
        return self._whole(outputs)

    def _whole(self, outputs: Sequence[Tensor]) -> Found:
        assert self.rebuild is not None, "known since the recording"
        return self.rebuild(outputs)

    def _load(self, step: Given) -> None:
        for static, value in zip(flatten(self.input)[0], flatten(step)[0], strict=True):
            static.copy_(value)

    def _run(self) -> list[Tensor]:
        assert self.input is not None
        outputs, self.rebuild = flatten(self.work(self.input))
        return outputs
