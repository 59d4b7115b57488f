"""Prose that readers meet: words to avoid, how docstrings open, sizes of pages, names of tests."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.prose
ROOT = Path(__file__).parent.parent
README_MAX = 8_000  # bytes
WORDS_MAX = 26_000  # of README.md and the pages of docs/ that are written by hand
AGENTS_MAX = 400  # words
NAME_MAX = 60  # characters of a test's name
OPENINGS_MAX = 60  # docstrings of app/ that open with one of OPENINGS
OPENINGS = ("Of", "What", "Those", "The same", "Who", "Whether", "As", "Where")
GENERATED = ("keys.md", "commands.md", "hugging-face-keys.md", "other-names.md",
             "published-runs.md")  # fmt: skip
# A word or phrase to avoid -> the field's word for it. Line breaks and underscores count as blanks.
AVOIDED = {
    r"eight bits?": "FP8",
    r"stash\w*": "paged activation buffer",
    r"strands?": "thread activity",
    r"quickest": "fastest",
    r"fill(?:ed|s)? up": "padded",
    r"go(?:es)? on": "resumes, continues",
    r"lent|lends?|borrow\w*": "replica, remote expert",
    r"whole steps?": "full iteration, global batch, end to end",
    r"boards": "trackers",
    r"(?:bring|brings|brought|bringing) (?:\w+ )?home": "combine, return",
    r"(?:comput\w+|tak(?:e|es|en|ing)) (?:\w+ )?again": "recompute, rerun",
    r"drafts?": "temporary folder",
    r"(?<!dot )(?<!outer )(?<!inner )(?<!scalar )(?<!cartesian )(?<!degree )products?(?! ?\()"
    r"(?! of (?:the )?(?:\w+ )?(?:degrees|sizes|factors|numbers))": "GEMM, matmul, linear layer",
}
# Places where the word is right: (file, word as it stands there).
ALLOWED = {
    ("app/config/renamed.py", "product"),  # former names of keys
    ("app/config/renamed.py", "stash"),
}
ALLOWED_MAX = 15


def plain(text: str) -> str:
    """Return text in one line: without `itertools.product`, the signs of comments and the quotes at
    the ends of lines, with blanks for underscores.
    """
    text = re.sub(r"^from itertools import .*", "", text, flags=re.MULTILINE)
    text = re.sub(r"[\"']?\s*\n\s*(?:#+ |[fr]?[\"'])?\s*", " ", text)
    return re.sub(r"[\s_]+", " ", text)


def avoided(text: str) -> Iterator[tuple[str, str]]:
    """Yield each word to avoid as it stands in the text, and what to write."""
    text = plain(text)
    for pattern, better in AVOIDED.items():
        for found in re.finditer(rf"\b(?:{pattern})(?!\w)", text, re.IGNORECASE):
            yield found[0], better


def names_of_tests() -> Iterator[tuple[str, str]]:
    """Yield the file and the name of every test."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name in re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.MULTILINE):
            yield str(path.relative_to(ROOT)), name


def texts() -> Iterator[tuple[str, str]]:
    """Yield the files that readers meet with their texts; of tests, the names."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
    kinds = (("app", "*.py"), ("app", "*.txt"), ("graphfold", "*.py"), ("conf", "*.yaml"))
    for folder, end in (*kinds, ("docs", "*.md")):
        paths += sorted((ROOT / folder).rglob(end))
    for path in paths:
        yield str(path.relative_to(ROOT)), path.read_text()
    yield from names_of_tests()


@cache
def avoided_in_texts() -> Counter[tuple[str, str, str]]:
    """Return how often each file has a word to avoid: (file, word, what to write)."""
    found: Counter[tuple[str, str, str]] = Counter()
    for file, text in texts():
        found.update((file, word.lower(), better) for word, better in avoided(text))
    return found


def test_words_to_avoid():
    listed = [
        f"{file}: {word!r} × {count}, write: {better}"
        for (file, word, better), count in sorted(avoided_in_texts().items())
        if (file, word) not in ALLOWED
    ]
    assert listed == [], "\n".join(listed)


def test_allowed_words_are_few_and_needed():
    found = {(file, word) for file, word, _ in avoided_in_texts()}
    assert sorted(ALLOWED - found) == [] and len(ALLOWED) <= ALLOWED_MAX


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("in eight bits", ["eight bits"]),
        ("def test_whole_steps():", ["whole steps"]),
        ("# a run goes\n    # on later", ["goes on"]),
        ('"the values are computed "\n    f"again"', ["computed again"]),
        (
            "brings them home, the stash of borrowed experts",
            ["stash", "borrowed", "brings them home"],
        ),
        ("a quadratic product", ["product"]),
        ("the dot product; product(a, b); the product of the dense degrees", []),
        ("category one, dashboards, TensorBoard, redraft, silent, go once", []),
    ],
)
def test_words_are_found(text: str, words: list[str]):
    assert [word for word, _ in avoided(text)] == words


def openings(source: str) -> Iterator[str]:
    """Yield the first lines of docstrings that open with one of OPENINGS."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text and re.match(rf"(?:{'|'.join(OPENINGS)})\b", text):
            yield text.splitlines()[0]


def test_docstrings_open_with_what_they_do():
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "app").rglob("*.py"))
        for line in openings(path.read_text())
    ]
    assert len(found) <= OPENINGS_MAX, "\n".join(found)


def test_openings_are_found():
    source = (
        '"""What it is."""\ndef f():\n    """The same."""\ndef g():\n    """Assert. Of all."""\n'
    )
    assert [*openings(source)] == ["What it is.", "The same."]


def count_words(paths: list[Path]) -> int:
    """Return the words of files, as `wc -w` counts them."""
    return sum(len(path.read_text().split()) for path in paths)


def by_hand() -> list[Path]:
    """Return README.md and the pages of docs/ that no script writes."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [ROOT / "README.md", *(page for page in pages if page.name not in GENERATED)]


def test_pages_are_short():
    size = (ROOT / "README.md").stat().st_size
    assert size <= README_MAX, f"README.md has {size:,} bytes"
    words = count_words(by_hand())
    pages = sorted(by_hand(), key=lambda page: -count_words([page]))
    longest = ", ".join(page.name for page in pages[:4])
    told = f"{words:,} of {WORDS_MAX:,} words written by hand; the longest pages are {longest}"
    assert words <= WORDS_MAX, told
    assert count_words([ROOT / "AGENTS.md"]) <= AGENTS_MAX


def test_generated_pages_say_so():
    for name in GENERATED:
        text = (ROOT / "docs" / name).read_text()
        assert re.search(r"^`?(?:The names|`?python scripts/\w+\.py`)", text, re.MULTILINE), name
    assert not {*by_hand()} & {ROOT / "docs" / name for name in GENERATED}


def test_words_are_counted(tmp_path: Path):
    (tmp_path / "a.md").write_text("| one | two |\n\nthree")
    assert count_words([tmp_path / "a.md"]) == 6


def long_names(names: Iterator[tuple[str, str]]) -> list[str]:
    """Return the tests whose names are too long."""
    return [f"{file}: {name} ({len(name)})" for file, name in names if len(name) > NAME_MAX]


def test_names_of_tests_are_short():
    found = long_names(names_of_tests())
    assert found == [], "\n".join(found)


def test_long_names_are_found():
    names = [("a.py", "test_" + "x" * 55), ("a.py", "test_" + "x" * 56)]
    assert long_names(iter(names)) == [f"a.py: test_{'x' * 56} (61)"]
