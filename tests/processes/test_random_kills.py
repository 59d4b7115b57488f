"""Runs that are killed, stopped and held up at drawn moments lose nothing that was saved.

tests/ordeals.py says what they are held to; tests/RELIABILITY.md how many of what there are. A case
that fails prints its seed, its command lines, and what happened when.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import FORKED, Case
from tests.ordeals import Undisturbed, endure
from tests.training import corpus_in


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    corpus = corpus_in(tmp_path_factory.mktemp("corpus"))
    return Undisturbed(corpus, tmp_path_factory.mktemp("undisturbed"))


def cases(*ranks: int) -> list[Case]:
    return [case for case in FORKED if case.ranks in ranks]


# Classes are run side by side.


@pytest.mark.full
class TestPairs:
    @pytest.mark.parametrize("case", cases(2), ids=lambda case: f"seed-{case.seed}")
    def test_two(self, case: Case, tmp_path: Path, undisturbed: Undisturbed):
        endure(case, undisturbed, tmp_path)


@pytest.mark.full
class TestOthers:
    @pytest.mark.parametrize("case", cases(1, 4), ids=lambda case: f"seed-{case.seed}")
    def test_one_and_four(self, case: Case, tmp_path: Path, undisturbed: Undisturbed):
        endure(case, undisturbed, tmp_path)
