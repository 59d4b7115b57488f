"""A long run with copies in memory, checkpoints and validations grows in nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soaks import soak
from tests.training import corpus_in

MIB = 2**20


@pytest.mark.full
def test_a_long_run_does_not_grow(tmp_path: Path):
    seen = soak(corpus_in(tmp_path / "corpus"), tmp_path / "run", 1500)
    assert len(seen.steps) == 10 and len(seen.processes) == 6  # launcher, agent, 2 supervised ranks
    growth = seen.growth(since=5)  # once malloc has what it keeps
    assert abs(growth.pop("metrics")["per_step"]) < 20, "bytes: digits"
    folder = growth.pop("folder")
    assert folder["files"] <= 0 and folder["bytes"] < 1000, "digits of steps in manifests"
    for name, row in growth.items():
        assert row["files"] <= 0 and row["threads"] <= 1, name  # a copy's thread comes and goes
        assert row["resident"] < 8 * MIB, name
