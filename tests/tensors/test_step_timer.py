"""Parts of a step on a clock and a GPU of our own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from app.engine.step.timer import StepTimer

NOW = {"host": 0.0, "gpu": 0.0}  # seconds; when the host is, and when the GPU will have no work


class Recorded:
    """CUDA event: reached when all work before it is done, and not before the host records it."""

    def __init__(self, **_: Any) -> None:
        self.reached = 0.0

    def record(self) -> None:
        self.reached = NOW["gpu"] = max(NOW["gpu"], NOW["host"])

    def elapsed_time(self, later: Recorded) -> float:
        return 1e3 * (later.reached - self.reached)


def timed(device: str, work_s: float, reads_s: float) -> StepTimer:
    """A step of 2 s of launches, whose work on the GPU ends so long after them."""
    timer = StepTimer(torch.device(device))
    NOW.update(host=10.0, gpu=10.0)
    timer.begin()
    NOW.update(host=12.0, gpu=12.0 + work_s)
    timer.launched()
    NOW["host"] += reads_s
    timer.has_read()
    NOW["host"] = max(NOW["host"], NOW["gpu"])
    timer.finished()
    return timer


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: NOW["host"])
    monkeypatch.setattr(torch.cuda, "Event", Recorded)


def test_a_gpu_waits_for_batches_once_it_has_no_work():
    slow = timed("cuda", 3.0, 5.0)
    assert (slow.data_wait_ms, slow.launch_ms, slow.device_wait_ms) == (2000, 2000, 0)
    hidden = timed("cuda", 3.0, 1.0)
    assert (hidden.data_wait_ms, hidden.device_wait_ms) == (0, 2000)


def test_a_cpu_waits_for_all_of_them():
    timer = timed("cpu", 0.0, 5.0)
    assert timer.data_wait_ms == 5000
    assert timer.launch_ms is None and timer.device_wait_ms is None
