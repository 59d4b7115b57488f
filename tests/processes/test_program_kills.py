"""As test_random_kills.py, with new programs, which are also hit while they import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kills import FRESH, Case
from tests.ordeals import Undisturbed, endure
from tests.training import corpus_in


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    corpus = corpus_in(tmp_path_factory.mktemp("corpus"))
    return Undisturbed(corpus, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("case", FRESH, ids=lambda case: f"seed-{case.seed}")
def test_programs(case: Case, tmp_path: Path, undisturbed: Undisturbed):
    endure(case, undisturbed, tmp_path, fresh=True)
