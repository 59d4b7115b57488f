"""The time of something on a GPU, with cold caches and without the host's share."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

WARMUP, TIMED = 5, 20
FLUSHED = 256 * 2**20  # bytes written between two measurements: more than the L2 cache holds
PAUSE = 2_000_000  # cycles, about a millisecond, in which the host gets ahead


def gpu_time(fn: Callable[[], Any]) -> tuple[float, float]:
    """Median of 20 runs behind 5 others, and the distance from their 10th to their 90th percentile;
    both in ms.

    Between runs 256 MiB are written. The device pauses in front of a run, so that launches do not
    count unless `fn` takes the host longer than that or waits for the device.
    """
    flushed = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    times = [_once(fn, flushed) for _ in range(WARMUP + TIMED)][WARMUP:]
    tenths = statistics.quantiles(times, n=10)
    return statistics.median(times), tenths[-1] - tenths[0]


def _once(fn: Callable[[], Any], flushed: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    flushed.zero_()
    torch.cuda._sleep(PAUSE)
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
