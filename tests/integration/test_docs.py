"""The pages as a whole: all are reachable, links lead somewhere, and what they quote is said."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest

from app.cli.processes.output import ENDED as ENDED_WITH_READER
from app.engine.files.signals import INTERRUPTED, STOPPED
from app.engine.watchdog.watchdog import EXIT_STUCK
from app.errors import CORRUPTED, DIVERGED
from tests.training import ROOT

pytestmark = pytest.mark.docs

README = (ROOT / "README.md").read_text()
MESSAGES = (ROOT / "docs/messages.md").read_text()
PAGES = sorted((ROOT / "docs").glob("*.md"))
IGNORED = (".", "build", "runs", "site", "sweeps")  # folders beside the sources
MARKDOWN = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not path.relative_to(ROOT).parts[0].startswith(IGNORED)
]
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"`([^`]+)`")
BETWEEN = re.compile(r"…|: |; |, |[()]|=…")  # fixed parts of a message
SHORTEST = 10  # letters of a part that says which message is meant


def anchors(page: Path) -> set[str]:
    """What a link may name in a page, as GitHub makes it from headings."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Return the relative links of a page that lead to no file, or to no heading of it."""
    found = []
    for link in LINK.findall(CODE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def test_every_page_is_in_the_index_and_the_index_in_the_readme():
    index = ROOT / "docs/README.md"
    listed = set(LINK.findall(index.read_text()))
    assert {page.name for page in PAGES if page != index} <= listed
    assert "docs/README.md" in LINK.findall(README)


def test_exit_codes_are_those_of_the_programs():
    rows = re.findall(r"^\| (\d+) \|", MESSAGES, re.MULTILINE)
    stops = {DIVERGED, CORRUPTED, STOPPED, EXIT_STUCK, INTERRUPTED, ENDED_WITH_READER}
    ends = {os.EX_OK, 1, 2, *stops}
    assert sorted(map(int, rows)) == sorted(ends)


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path):
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path):
    page = tmp_path / "page.md"
    other = tmp_path / "other.md"
    other.write_text("# A title: its `name`\n```\n# comment\n```\n")
    wrong = ["#gone", "gone.md", "other.md#comment"]
    right = ["#here", "other.md", "other.md#a-title-its-name", "https://gone.example"]
    page.write_text("## Here\n" + "\n".join(f"[text]({link})" for link in (*wrong, *right)))
    assert broken(page) == wrong


def test_the_picture_of_a_run_can_be_drawn_again():
    assert "![A terminal in which the default model trains, and its loss](docs/run.png)" in README
    assert 'PICTURE = ROOT / "docs/run.png"' in (ROOT / "scripts/run_picture.py").read_text()


@cache
def strings() -> str:
    """All that the program may say: its strings, with … for what is filled in."""
    found = []
    for path in sorted((ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quoted() -> list[str]:
    """Messages in the first column of the tables, without those of torch, gloo and NCCL."""
    _, *tables = MESSAGES.split("\n| message |")
    cells = [
        line.split(" | ")[0]
        for table in tables
        for line in table.partition("\n\n")[0].splitlines()
        if line.startswith("| ")
    ]
    ours = [
        re.sub(r"(?:torch's|gloo's|NCCL's) `[^`]+`", "", cell.replace("(`", "`")) for cell in cells
    ]
    return [said for cell in ours for said in SAID.findall(cell) if " " in said]


def test_there_are_messages():
    assert len(quoted()) >= 20


@pytest.mark.parametrize("said", quoted())
def test_a_message_is_one_that_the_program_has(said: str):
    text = re.sub(r"^(train\.py|plan|torchrun): (\S+=\S*: )?", "", said)
    parts = [part.strip(" .") for part in BETWEEN.split(text)]
    assert any(len(part) >= SHORTEST for part in parts), "too short to say which message is meant"
    assert [part for part in parts if part not in strings()] == []
