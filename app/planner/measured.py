"""Means of a run's recorded metrics over its settled steps, and sums of its profiled steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.choices import GraphImpl
from app.config import Run

SETTLING = 5  # steps ignored while caches and clocks warm up, after those before capture
Row = Mapping[str, Any]  # line of metrics.jsonl


@dataclass(frozen=True, slots=True)
class TraceSums:
    """Sums of profiled steps on rank 0, ms per step (docs/planning.md)."""

    first: int  # profiled steps, by their numbers in metrics.jsonl
    last: int
    parts: Mapping[str, float] = field(default_factory=dict)  # kind of kernel -> its kernels' time
    # of a GPU, None on a CPU: time with a compute kernel, and with nothing but communication, on
    # the rank that waits least for others
    compute_ms: float | None = None
    exchange_ms: float | None = None
    kernels: float = 0.0  # number of kernels on the GPU


@dataclass(frozen=True, slots=True)
class Measurements:
    """Means per step over settled steps; None for what was not recorded."""

    first: int  # first and last settled step
    last: int
    steps: int  # number of them
    step_ms: float
    data_wait_ms: float  # on the rank that waits longest
    rerun_ms: float | None  # rerun steps beyond the others
    launch_ms: float | None
    device_wait_ms: float | None
    rank_load: float | None
    gpu_clock: float | None
    gpu_others: float | None
    host_delay_ms: float | None
    host_cores: float | None
    host_others: float | None

    @classmethod
    def of(
        cls, rows: Iterable[Row], run: Run, trace: TraceSums | None = None
    ) -> Measurements | None:
        """Return the means over lines of metrics.jsonl, without the profiled steps; None if no step
        is settled.
        """
        trained = [row for row in rows if "loss" in row and "step_ms" in row]
        if not trained:
            return None
        begin = trained[0]["step"] + settling(run)
        profiled = range(trace.first, trace.last + 1) if trace else range(0)
        settled = [row for row in trained if row["step"] >= begin and row["step"] not in profiled]
        if not settled:
            return None
        # a line at the log interval covers the steps since the one before
        covers = run.log.interval - 1
        lines = [
            row
            for row in settled
            if row["step"] - covers > begin
            and not (trace and trace.first <= row["step"] <= trace.last + covers)
        ]

        def each(key: str) -> float | None:
            return _mean(settled, key)

        def covered(key: str) -> float | None:
            return _mean(lines or settled, key)

        loads = ("moe_rank_load_after", "moe_rank_load")
        return cls(
            settled[0]["step"],
            settled[-1]["step"],
            len(settled),
            step_ms=each("step_ms") or 0.0,
            data_wait_ms=max(each("data_wait_ms") or 0.0, covered("data_wait_max_ms") or 0.0),
            rerun_ms=_rerun_ms(settled),
            launch_ms=each("launch_ms"),
            device_wait_ms=each("device_wait_ms"),
            rank_load=next((load for key in loads if (load := covered(key)) is not None), None),
            gpu_clock=covered("gpu_clock"),
            gpu_others=covered("gpu_others"),
            host_delay_ms=covered("host_delay_ms"),
            host_cores=covered("host_cores"),
            host_others=covered("host_others"),
        )


def settling(run: Run) -> int:
    """Return how many first steps of a process are not compared with its plan."""
    captures = run.cuda_graph.impl is not GraphImpl.none
    return SETTLING + (run.cuda_graph.warmup_steps if captures else 0)


def _mean(rows: Sequence[Row], key: str) -> float | None:
    found = [float(row[key]) for row in rows if row.get(key) is not None]
    return sum(found) / len(found) if found else None


def _rerun_ms(rows: Sequence[Row]) -> float | None:
    """Return ms per step by which rerun steps exceed the mean of the others; None without any."""
    again = [float(row["step_ms"]) for row in rows if row.get("reruns")]
    others = _mean([row for row in rows if not row.get("reruns")], "step_ms")
    if not again or others is None:
        return None
    return sum(ms - others for ms in again) / len(rows)
