"""Sums of a torch profile: time by part of a model, and how much communication is exposed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch.autograd import DeviceType

# part -> what a kernel's or operation's name has; the first match counts
PARTS = tuple(
    (part, re.compile(pattern, re.IGNORECASE))
    for part, pattern in (
        ("communication", r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
        ("attention", r"flash|fmha|attention|sdpa"),
        ("grouped GEMMs", r"grouped|group_gemm"),
        ("GEMMs", r"gemm|gemv|cutlass|nvjet|xmma|addmm|baddbmm|\bb?mm\b"),
        ("optimizer", r"adam|muon|foreach|multi_tensor"),
        ("copies", r"memcpy|memset|copy_"),
    )
)
COMMUNICATION, OTHER, PYTHON = "communication", "other", "Python"
FROM_HOST = ("memcpy htod", "memcpy dtoh")  # batches and reports, beside the step's work
Span = tuple[float, float]  # begin and end, µs


class KernelEvent(Protocol):
    """Fields that are read of torch.autograd.profiler_util.FunctionEvent."""

    name: str
    device_type: DeviceType
    is_user_annotation: bool
    self_cpu_time_total: float  # µs
    time_range: TimeRange


class TimeRange(Protocol):
    """Begin and end, µs."""

    start: float
    end: float


@dataclass(frozen=True, slots=True)
class KernelSums:
    """Sums over all profiled steps, ms; None on a CPU."""

    parts: dict[str, float]
    compute: float | None = None  # time with a compute kernel
    exchange: float | None = None  # time with communication alone
    kernels: int = 0

    @classmethod
    def of(cls, events: Iterable[KernelEvent]) -> KernelSums:
        """Sum up events: kernels where a GPU ran any, else operations on the CPU."""
        known = list(events)
        kernels = [
            event
            for event in known
            if event.device_type == DeviceType.CUDA
            and not event.is_user_annotation
            and not event.name.lower().startswith(FROM_HOST)
        ]
        parts: dict[str, float] = defaultdict(float)
        if not kernels:
            for event in known:
                part = PYTHON if event.is_user_annotation else part_of(event.name)
                parts[part] += event.self_cpu_time_total / 1e3
            return cls(dict(parts))
        spans: dict[bool, list[Span]] = {True: [], False: []}
        for event in kernels:
            part = part_of(event.name)
            span = event.time_range.start, event.time_range.end
            parts[part] += (span[1] - span[0]) / 1e3
            spans[part == COMMUNICATION].append(span)
        compute, whole = covered(spans[False]), covered(spans[False] + spans[True])
        return cls(dict(parts), compute / 1e3, (whole - compute) / 1e3, len(kernels))


def part_of(name: str) -> str:
    """Return the part of a kernel or operation, by its name."""
    return next((part for part, pattern in PARTS if pattern.search(name)), OTHER)


def covered(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans."""
    total, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total
