"""Capture decoding steps as CUDA graphs, or as their stand-in on a CPU.

One graph per stage of this rank: send/recv of hidden states between stages stays outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.choices import Dtype
from app.config import Run
from app.engine.capture.recorder import Recorder, Recording
from app.model.chunk import Chunk
from app.plan.parts.dispatcher import run_dispatcher
from app.plan.parts.static import PlannedStatic

WARMUP = 1  # eager steps before the recorded one, for compilation and set-up of libraries
POOL = 0


class CapturedStep:
    """Decoding step of one chunk: run eagerly first, then recorded, then replayed."""

    def __init__(self, compute: Callable[[Tensor], Tensor], recorder: Recorder) -> None:
        self.compute = compute
        self.recorder = recorder
        self.taken = 0
        self.input: Tensor | None = None
        self.recording: Recording | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return `compute(x)`, in memory that the next step overwrites.

        `compute` may read other tensors only at fixed addresses.
        """
        self.taken += 1
        if self.taken <= WARMUP:
            return self.compute(x)
        if self.recording is None or self.input is None:
            # `input` is kept: replays read it at this address
            self.input = static = x.clone()
            self.recording, (out,) = self.recorder.record(lambda: [self.compute(static)], POOL)
            return out
        self.input.copy_(x)
        return self.recording.replay()[0]


def why_eager(run: Run, chunks: Sequence[Chunk], rows: int, device: torch.device) -> str | None:
    """Say why steps of this many `rows` cannot be captured on this rank; None if they can."""
    planned = run_dispatcher(run)
    if planned is None:
        return None
    if any(
        phase.host_sync for chunk in chunks for layer in chunk.in_order for phase in layer.phases
    ):
        return (
            "the host waits for the sizes of each all-to-all (model.moe.dispatcher=static does not)"
        )
    if isinstance(planned, PlannedStatic) and planned.may_lack_rows(rows):
        return "experts may lack memory for tokens, which the host must check"
    if device.type == "cuda" and run.precision.params is not Dtype.bfloat16:
        return f"the host waits for the sizes of experts in {run.precision.params.value}"
    return None
