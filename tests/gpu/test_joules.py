"""Joules per token of runs on GPUs, beside the counters read around the whole program."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from app.engine.report.energy import EnergyCounter, energy_counter
from tests.gpu.programs import GPUS, losses, rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="needs a CUDA device")]
WATTS = (10, 2000)  # that a GPU takes


def joules(counters: list[EnergyCounter]) -> float:
    """Return joules of these GPUs since their driver was loaded."""
    return sum(each.read() or 0 for each in counters) / 1e3


@pytest.mark.parametrize("ranks", [1, 2])
def test_joules_per_token_are_those_of_the_counters(tmp_path: Path, ranks: int):
    if ranks > GPUS:
        pytest.skip("needs two CUDA devices")
    counters = [energy_counter(torch.device("cuda", place)) for place in range(ranks)]
    found = [each for each in counters if each is not None]
    before = joules(found)
    asked = ("train.steps=300", "log.interval=100", f"parallel.dp={ranks}", "precision=bf16")
    losses(tmp_path / "run", *asked)
    rows = [row for row in rows_of(tmp_path / "run") if row["step"] % 100 == 0]
    told = [row.get("joules_per_token") for row in rows]
    if len(found) < ranks:
        assert told == [None] * 3
        pytest.skip("these GPUs count no energy")
    tokens = rows[0]["tokens"]  # of each interval
    assert 0 < sum(told) * tokens <= joules(found) - before
    for (earlier, later), each in zip(pairwise(rows), told[1:], strict=True):
        watts = each * tokens / (later["time"] - earlier["time"]) / ranks
        assert WATTS[0] < watts < WATTS[1]
