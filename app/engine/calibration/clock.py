"""Time functions on a GPU with cold caches, or on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARMUP, TIMED = 3, 10
FLUSHED = 256 * 2**20  # bytes written between two measurements: more than an L2 cache holds
PAUSE = 2_000_000  # cycles, about a millisecond, in which the host gets ahead
TINY = 200  # kernels per measurement of kernel start and launch times

Outputs = Tensor | tuple[Tensor, ...]
Function = Callable[..., Outputs]


class Clock:
    """Timer for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        size = FLUSHED if device.type == "cuda" else 1
        self.flushed = torch.empty(size, dtype=torch.int8, device=device)

    def seconds(
        self, run: Callable[[], object], before: Callable[[], object] = lambda: None
    ) -> float:
        """Return the median time of several runs after warm-up, each with a flushed L2 cache.

        On a GPU launch time is not included. `before` runs ahead of each run, outside the timing.
        """
        once = self._on_gpu if self.device.type == "cuda" else self._on_cpu
        return statistics.median([once(run, before) for _ in range(WARMUP + TIMED)][WARMUP:])

    def steady(self, run: Callable[[], object], period: float) -> float:
        """Return the time of a run after `period` seconds of back-to-back runs.

        By then a GPU may have lowered its clock.
        """
        count = max(1, round(period / self.seconds(run)))
        for _ in range(count):
            run()
        timed = max(1, count // 4)
        if self.device.type == "cuda":
            return self._between_events(run, timed) / timed
        begun = time.perf_counter()
        for _ in range(timed):
            run()
        return (time.perf_counter() - begun) / timed

    def passes(self, run: Function, inputs: Sequence[Tensor]) -> tuple[float, float]:
        """Return the times of a forward, and of the backward to all inputs."""
        with torch.no_grad():
            forward = self.seconds(lambda: run(*inputs))
            grads = tuple(map(torch.randn_like, _as_tuple(run(*inputs))))
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        both = self.seconds(lambda: torch.autograd.grad(_as_tuple(run(*leaves)), leaves, grads))
        return forward, max(both - forward, 0.1 * forward)

    def start(self) -> float:
        """Return the time per tiny kernel in a CUDA graph; on a CPU, of one tiny operation."""
        x = torch.zeros(1, device=self.device)

        def many() -> None:
            for _ in range(TINY):
                x.add_(1)

        if self.device.type != "cuda":
            return self.seconds(many) / TINY
        many()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            many()
        return self.seconds(graph.replay) / TINY

    def launch(self, run: Function, inputs: Sequence[Tensor], kernels: int) -> float:
        """Return the host's time per kernel of a forward and a backward to all inputs.

        `kernels` is their number. They must be so small that the device waits for the host.
        """
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        grads = tuple(map(torch.ones_like, _as_tuple(run(*leaves))))
        times = []
        for _ in range(TINY):
            begun = time.perf_counter()
            torch.autograd.grad(_as_tuple(run(*leaves)), leaves, grads)
            times.append(time.perf_counter() - begun)
            self._finish()
        return statistics.median(times) / kernels

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _on_cpu(self, run: Callable[[], object], before: Callable[[], object]) -> float:
        before()
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun

    def _on_gpu(self, run: Callable[[], object], before: Callable[[], object]) -> float:
        torch.cuda.synchronize(self.device)
        self.flushed.zero_()
        torch.cuda._sleep(PAUSE)
        before()
        return self._between_events(run, 1)

    def _between_events(self, run: Callable[[], object], times: int) -> float:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3


def _as_tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
