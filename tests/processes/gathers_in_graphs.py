"""Shared by test_gathers_in_graphs.py and other tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from app.engine.capture.recorder import Work
from app.engine.capture.stand_in import HostRecorder, HostRecording
from app.engine.step.engine import Engine
from app.optim.adam import AdamShard


@contextmanager
def replays_as_on_a_gpu(engine: Engine) -> Iterator[None]:
    """Within the block replays gather what was gathered when they were recorded, and the host does
    not know that they do.
    """
    gather = engine.optimizer._param_gather
    record, replay = HostRecorder.record, HostRecording.replay
    recorded: list[tuple[HostRecording, set[AdamShard]]] = []

    def noting(recorder: HostRecorder, work: Work, pool: int) -> Any:
        stale = set(gather._stale)
        recording, outputs = record(recorder, work, pool)
        recorded.append((recording, stale))
        return recording, outputs

    def kernels_alone(recording: HostRecording) -> Any:
        known = gather._stale
        (stale,) = (stale for each, stale in recorded if each is recording)
        gather._stale = set(stale)
        outputs = replay(recording)
        assert not gather._in_flight
        gather._stale = known
        return outputs

    with (
        mock.patch.object(HostRecorder, "record", noting),
        mock.patch.object(HostRecording, "replay", kernels_alone),
    ):
        yield
