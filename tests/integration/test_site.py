"""The site of docs/: its navigation has every page, and a broken link fails the build."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts import docs_site as site
from tests.training import ROOT

CONFIG = (ROOT / "zensical.toml").read_text()
KINDS = ("Learn", "Do", "Look up", "Understand")
needs_zensical = pytest.mark.skipif(
    find_spec("zensical") is None, reason="needs Zensical: make docs installs it"
)


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages that a part of the navigation names."""
    match nav:
        case str():
            yield nav
        case dict():
            for each in nav.values():
                yield from pages_of(each)
        case list():
            for each in nav:
                yield from pages_of(each)


def test_navigation_has_every_page_once():
    first, *parts = tomllib.loads(CONFIG)["project"]["nav"]
    assert first == {"Graphfold": "README.md"}
    assert tuple(name for part in parts for name in part) == KINDS
    pages = [*pages_of([first, *parts])]
    assert sorted(pages) == sorted([*site.BESIDE, *(path.name for path in site.DOCS.glob("*.md"))])


def test_navigation_and_index_have_the_same_kinds():
    index = (ROOT / "docs/README.md").read_text()
    assert tuple(re.findall(r"^## (.*)$", index, re.MULTILINE)) == KINDS
    for part in tomllib.loads(CONFIG)["project"]["nav"][1:]:
        ((kind, listed),) = part.items()
        section = index.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        named = {*re.findall(r"\]\((?:\.\./)?([^)]*)\)", section)}
        assert named == {*pages_of(listed)}, kind


def test_links_that_leave_docs_become_text():
    text = "[code](../app/config), [a](fp8.md#x), [log](../CHANGELOG.md), ![](run.png), [w](https://x.y)"
    expected = "code, [a](fp8.md#x), [log](CHANGELOG.md), ![](run.png), [w](https://x.y)"
    assert site.on_site(text, site.DOCS) == expected
    assert site.on_site("[page](docs/fp8.md)", ROOT) == "[page](fp8.md)"
    assert site.on_site("[page](gone.md)", site.DOCS) == "[page](gone.md)", "the build refuses it"


@needs_zensical
@pytest.mark.full
def test_site_builds():
    assert site.main() == 0
    assert (ROOT / "site/index.html").is_file() and (ROOT / "site/keys/index.html").is_file()


@needs_zensical
@pytest.mark.parametrize(
    ("link", "works"),
    [("other.md#the-end-the-rest", True), ("gone.md", False), ("other.md#gone", False)],
)
def test_broken_link_fails_the_build(tmp_path: Path, link: str, works: bool):
    pages = tmp_path / "build/docs"
    pages.mkdir(parents=True)
    (pages / "README.md").write_text(f"# Title\n\n[text]({link})\n")
    (pages / "other.md").write_text("# Other\n\n## The end: the `rest`\n")
    (tmp_path / "zensical.toml").write_text(re.sub(r"nav = \[\n.*?\n\]\n", "", CONFIG, flags=re.S))
    line = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0) == works, done.stdout + done.stderr
