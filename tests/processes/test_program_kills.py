"""test_random_kills.py with new programs, which are also killed during their imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kills import FORKED, FRESH, Case, counted
from tests.ordeals import Undisturbed, endure
from tests.training import ROOT, corpus_in


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    corpus = corpus_in(tmp_path_factory.mktemp("corpus"))
    return Undisturbed(corpus, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("case", FRESH, ids=lambda case: f"seed-{case.seed}")
def test_programs(case: Case, tmp_path: Path, undisturbed: Undisturbed):
    endure(case, undisturbed, tmp_path, fresh=True)


def test_the_docs_count_them_as_they_are_drawn():
    text = (ROOT / "tests/RELIABILITY.md").read_text()
    for by, found in counted([*FORKED, *FRESH]).items():
        (line,) = re.findall(rf"^\| by {by} \| (.*) \|$", text, re.MULTILINE)
        told = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)(?:, |$)", line)}
        assert told == found and sum(told.values()) == 200


def test_the_docs_name_tests_that_are_there():
    text = (ROOT / "tests/RELIABILITY.md").read_text()
    names = set(re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)`", text))
    assert {name for name in names if not list((ROOT / "tests").rglob(name))} == set()
