"""docs/keys.md and docs/commands.md are what scripts/reference_docs.py writes, and leave nothing
out.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass

import pytest

from app.cli.options.keys import all_keys, is_section
from app.config.advanced import is_advanced
from scripts import reference_docs
from scripts.reference_docs import COMMAND, DOCS, PAGES, groups
from tests.training import ROOT

pytestmark = pytest.mark.docs


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_current(name: str):
    same = (DOCS / name).read_text() == PAGES[name]()
    assert same, f"docs/{name} is stale: regenerate with {COMMAND}"


def test_keys_page_has_every_key_and_option():
    page = PAGES["keys.md"]()
    listed = re.findall(r"^\| `([a-z0-9_.]+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(key for key in all_keys() if not is_section(key))
    headings = set(re.findall(r"^## (.*)$", page, re.MULTILINE))
    sections = {key for key in all_keys() if is_section(key) and not is_advanced(key)}
    assert headings == {"Top level", "experiment", "Advanced", *sections}
    advanced = re.findall(
        r"^\| `([a-z0-9_.]+)` \|", page.partition("\n## Advanced")[2], re.MULTILINE
    )
    assert sorted(advanced) == sorted(key for key in listed if is_advanced(key))
    for group in groups():
        for path in (ROOT / "conf" / group).glob("*.yaml"):
            assert re.search(rf"^\| `\+?{group}={path.stem}`", page, re.MULTILINE)


def test_commands_page_has_every_program():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    page = PAGES["commands.md"]()
    assert set(re.findall(r"`(graphfold-\w+)`", page)) == set(scripts)
    assert page.count("\n## ") == len(reference_docs.PROGRAMS) + len(reference_docs.SCRIPTS)


@dataclass(frozen=True)
class Example:
    """Fields with a comment beside, above, both, and none."""

    beside: int = 1  # steps between lines
    # above,
    # in two lines
    above: float = 0.0
    # first
    both: int = 2  # second
    none: bool = False


def test_comments_of_fields_are_found():
    assert reference_docs.comments(Example) == {
        "beside": "steps between lines",
        "above": "above, in two lines",
        "both": "first second",
        "none": "",
    }


def test_key_without_comment_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference_docs, "owner_of", lambda section: Example)
    with pytest.raises(ValueError, match=r"app/config: log\.none has no comment"):
        list(reference_docs.rows_of("log"))


def test_units_come_from_names_and_comments():
    assert reference_docs.unit("a.sends_gb_s", float, "") == "GB/s"
    assert reference_docs.unit("a.warmup_samples", int | None, "the same in samples") == "samples"
    assert reference_docs.unit("a.interval", int, "steps between lines") == "steps"
    assert reference_docs.unit("a.name", str, "steps") == ""
