"""A decoding step as a CUDA graph, or where there is none its stand-in on a CPU.

One graph per stage of this rank: between stages hidden states travel outside of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.choices import Dtype
from app.config import Run
from app.engine.capture.recorder import Recorder, Recording
from app.model.chunk import Chunk
from app.plan.dispatchers.choose import run_dispatcher
from app.plan.dispatchers.static import PlannedStatic

WARMUP = 1  # steps before one is recorded: what is compiled, and libraries that prepare themselves
POOL = 0


class CapturedStep:
    """The step of one chunk, from static input to static output; first eagerly, then recorded,
    then replayed.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], recorder: Recorder) -> None:
        self.compute = compute
        self.recorder = recorder
        self.taken = 0
        self.input: Tensor | None = None
        self.recording: Recording | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The same as `compute`, which must read nothing else that moves; the result is
        overwritten by the next step.
        """
        self.taken += 1
        if self.taken <= WARMUP:
            return self.compute(x)
        if self.recording is None or self.input is None:
            self.input = static = x.clone()
            self.recording, (out,) = self.recorder.record(lambda: [self.compute(static)], POOL)
            return out
        self.input.copy_(x)
        return self.recording.replay()[0]


def why_eager(run: Run, chunks: Sequence[Chunk], rows: int, device: torch.device) -> str | None:
    """Why steps of so many `rows` cannot be captured on this rank; None: they can."""
    planned = run_dispatcher(run)
    if planned is None:
        return None
    if any(
        phase.host_sync for chunk in chunks for layer in chunk.in_order for phase in layer.phases
    ):
        return (
            "the host waits for the sizes of each exchange (model.moe.dispatcher=static does not)"
        )
    if isinstance(planned, PlannedStatic) and planned.may_lack_rows(rows):
        return "rows may be missing, and would be counted by the host"
    if device.type == "cuda" and run.precision.params is not Dtype.bfloat16:
        return f"the host waits for the sizes of experts in {run.precision.params.value}"
    return None
