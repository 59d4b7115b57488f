"""A long run with copies in memory, checkpoints and validations grows in nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soaks import growth, soak
from tests.training import corpus_in

# the most that it may grow: malloc's fragments, a copy's thread, digits of steps
ALLOWED = {"resident": 8 * 2**20, "threads": 1, "files": 0, "bytes": 1000, "records": 20}


@pytest.mark.full
def test_a_long_run_does_not_grow(tmp_path: Path):
    seen = soak(corpus_in(tmp_path / "corpus"), tmp_path / "run", 2400)
    assert len(seen[-1]) == 6 * 3 + 3  # launcher, agent, 2 supervisors, 2 ranks; the folder
    # after the heap has grown for the last time, by 9 MB near step 1,030
    grown = growth(seen, since=5)
    assert {key: more for key, more in grown.items() if more > ALLOWED[key.split()[-1]]} == {}
