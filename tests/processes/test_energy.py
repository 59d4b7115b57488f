"""Joules per token: read from counters of NVML, summed over GPUs, each counted once."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.engine.report.energy import EnergyCounter, EnergyMeter
from app.engine.report.metrics import Meter
from app.engine.step.records import StepReport
from tests.distributed import run_distributed
from tests.runs import TINY, engine_of, make_run

ONE, OTHER = uuid.UUID(int=2**128 - 3), uuid.UUID(int=5)
CPU = torch.device("cpu")
Readings = Sequence[int | None]  # millijoules


def counter(name: uuid.UUID, *readings: int | None) -> EnergyCounter:
    left = [*readings]
    return EnergyCounter(name, lambda: left.pop(0))


def per_token(rank: int, of_ranks: Sequence[tuple[uuid.UUID, Readings]], tokens: int) -> list[Any]:
    """Return what each interval after the first reading reports."""
    name, readings = of_ranks[rank]
    meter = EnergyMeter(counter(name, *readings), dist.group.WORLD, CPU)
    return [meter.metrics(tokens) for _ in readings[1:]]


def test_joules_are_summed_and_a_shared_gpu_counts_once():
    """The first rank and the third share a GPU."""
    readings = [(ONE, (1000, 3000, 7000)), (OTHER, (0, 500, 2000)), (ONE, (1000, 3000, 7000))]
    expected = [{"joules_per_token": 2.5 / 4}, {"joules_per_token": 5.5 / 4}]
    assert run_distributed(per_token, 3, readings, 4) == [expected] * 3


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ((5000, 1000, 2000), [{}, {"joules_per_token": 0.75}]),  # the driver was loaded anew
        ((0, None, 1000, 3000), [{}, {}, {"joules_per_token": 1.25}]),
    ],
)
def test_interval_without_all_counters_is_left_out(readings: Readings, expected: list[Any]):
    steady = [500 * number for number in range(len(readings))]
    found = run_distributed(per_token, 2, [(ONE, readings), (OTHER, steady)], 2)
    assert found == [expected] * 2


def test_report_has_the_joules_of_all_steps_since_the_last():
    """Steps that a rollback repeats take energy too."""
    found = run_distributed(reported, 1)[0]
    assert found == [None, 4.0, None, None, 2.0]


def reported(rank: int) -> list[float | None]:
    run = make_run(dataclasses.replace(TINY, moe=None))
    meter = Meter(engine_of(run, rank), first_step=1)
    assert meter.energy is None, "none on CPU"
    tokens, interval = meter.tokens_per_step, run.log.interval
    readings = (0, 8000 * tokens, 14_000 * tokens)
    meter.energy = EnergyMeter(counter(ONE, *readings), dist.group.WORLD, CPU)
    found = []
    for step in (interval - 1, interval, interval - 2, interval - 1, interval):
        report = StepReport(
            step=step, loss=1.0, aux_loss=0.0, z_loss=0.0, lr=0.0, weight_decay=0.0, grad_norm=0.0,
            skipped=0, step_ms=1.0,
        )  # fmt: skip
        meter.complete(report)
        found.append(report.joules_per_token)
    return found
