"""Ranks, supervisors, launchers and nodes that are killed at drawn moments change no bit of a run.

tests/deaths.py says what runs are held to; `python -m bench.kills` hits more of them.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.deaths import Alone, Setup, draw, endure
from tests.kills import SAVED, Hit
from tests.training import corpus_in

HITS, TRIES = 3, 8
FORKED, FRESH = range(1000, 1030), range(2000, 2004)  # seeds


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    place = tmp_path_factory.mktemp("alone")
    return Alone(corpus_in(place / "corpus"), place)


def test_death_after_a_checkpoint_newer_than_copies(tmp_path: Path, alone: Alone):
    """Copies of step 5, a checkpoint of step 6: ranks continue from that; then a launcher dies.

    On a busy host the rank dies later, perhaps when copies are newer: then once more.
    """
    kill = signal.SIGKILL
    rank = Hit("kill", kill, "rank", phase="step", draws=(0.3, 0.6, 0.2))  # after step 7
    agent = Hit("kill", kill, "agent", phase="step", draws=(0.6, 0.0, 0.0))
    for number in range(TRIES):
        place = tmp_path / str(number)
        first, second = endure(Setup(2, "dp=2", "own", 9), [rank, agent], alone, place)
        said = (place / "run-0/said-1").read_text()
        if found := re.search(r"to (\d+), from the newest checkpoint, in", said):
            break
    assert found is not None and int(found[1]) % SAVED == 0
    assert first["outcome"] == ["in place", "hit again"]
    assert second["saved"] >= 6 and "ends" in str(second["outcome"])


@pytest.mark.full
@pytest.mark.parametrize("seed", [*FORKED, *FRESH])
def test_deaths_at_drawn_moments(seed: int, tmp_path: Path, alone: Alone):
    setup, hits = draw(seed, HITS)
    records = [*endure(setup, hits, alone, tmp_path, fresh=seed in FRESH)]
    assert len(records) == HITS


def test_draws_hit_everything():
    cases = [draw(seed, HITS) for seed in (*FORKED, *FRESH)]
    hits = [hit for _, hits in cases for hit in hits]
    assert len(hits) > 100
    targets = {"rank", "pair", "supervisor", "agent", "launcher", "node"}
    assert {hit.target for hit in hits} == targets
    assert {setup.launch for setup, _ in cases} == {"own", "torchrun", "nodes"}
    assert len({(setup.memory, setup.layout) for setup, _ in cases}) > 12
