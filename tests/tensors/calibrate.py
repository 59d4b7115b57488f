"""Shared by test_calibrate.py and other tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from app.engine.calibration.clock import Clock
from app.engine.calibration.kernels import MeasuredSizes

CPU = torch.device("cpu")


TINY = MeasuredSizes(
    square=64,
    tokens=64,
    hidden=32,
    expert=16,
    vocab=64,
    experts=4,
    top_k=2,
    sequences=(16, 32),
    heads=2,
    widths=(16, 32),
    adam=2**8,
    steady_s=0.0,
    sent=(2**12, 2**20),
)


class Counting(Clock):
    """Runs everything once, and says that each took a tenth of a millisecond longer than the one
    before: what is measured does not depend on the machine.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.calls = 0

    def seconds(
        self, run: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> float:
        before()
        run()
        self.calls += 1
        return self.calls / 1e4

    def steady(self, run: Callable[[], object], period: float) -> float:
        return 2 * self.seconds(run)
