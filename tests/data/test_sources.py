"""Changed data are seen, by name; the same data elsewhere are the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from app.choices import Source
from app.config import DataConfig
from app.data import sources
from app.data.sources import BLOCK, BLOCKS, SUMMED_WHOLE, difference, file_sum, find_sources
from app.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A corpus of three files, one of them in a folder below."""
    (tmp_path / "corpus/deep").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "deep/c.txt"):
        (tmp_path / "corpus" / name).write_text(f"this is {name}")
    return tmp_path / "corpus"


def record(folder: Path, **options: object) -> sources.Record:
    """As a checkpoint gives it back."""
    config = DataConfig(source=Source.text, path=(f"{folder}/**/*.txt",), **options)
    return json.loads(json.dumps(find_sources(config).record()))


CHANGES: dict[str, Callable[[Path], object]] = {
    "b.txt has 4 bytes, had 13": lambda folder: (folder / "b.txt").write_text("else"),
    "b.txt has other contents": lambda folder: (folder / "b.txt").write_text("THIS IS b.txt"),
    "deep/c.txt is gone": lambda folder: (folder / "deep/c.txt").unlink(),
    "bb.txt is new": lambda folder: (folder / "bb.txt").write_text("more"),
    "a.txt has 1 bytes, had 13; and 2 more files": lambda folder: [
        file.write_text("x") for file in folder.rglob("*.txt")
    ],
}


@pytest.mark.parametrize("told", CHANGES)
def test_what_has_changed_is_named(folder: Path, told: str):
    before = record(folder)
    CHANGES[told](folder)
    assert difference(before, record(folder)) == told


def test_the_same_contents_elsewhere_are_the_same(folder: Path):
    """Copied, written later, and renamed without another order."""
    before = record(folder)
    copy = Path(shutil.copytree(folder, folder.parent / "elsewhere/copy"))
    (copy / "a.txt").rename(copy / "aa.txt")
    os.utime(copy / "b.txt", (1, 1))
    assert difference(before, record(copy)) is None
    (copy / "aa.txt").rename(copy / "x.txt")
    assert difference(before, record(copy)) == "a.txt is gone; and 1 more files"


def test_the_tokenizer_counts_by_its_contents(folder: Path):
    (folder / "one.json").write_text("{}")
    shutil.copy(folder / "one.json", folder / "two.json")
    before = record(folder, tokenizer=str(folder / "one.json"))
    assert difference(before, record(folder, tokenizer=str(folder / "two.json"))) is None
    (folder / "two.json").write_text("[]")
    told = difference(before, record(folder, tokenizer=str(folder / "two.json")))
    assert told == "the tokenizer has other contents"


def test_many_files_are_counted_instead_of_listed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "LISTED", 2)
    before = record(folder)
    assert before["files"] is None and difference(before, record(folder)) is None
    (folder / "a.txt").write_text("")
    told = difference(before, record(folder))
    assert told == "3 files of 31 bytes with other contents, were 3 files of 44 bytes"


def test_of_a_large_file_blocks_are_summed(tmp_path: Path):
    """From the first byte to the last; a change of the same length between them is not seen."""
    size = SUMMED_WHOLE + 1
    step, large = (size - BLOCK) // (BLOCKS - 1), tmp_path / "large"
    assert step > BLOCK
    seen = {0: True, size - 1: True, step: True, step + BLOCK - 1: True, BLOCK: False}
    with large.open("wb") as file:
        file.truncate(size)
    before = file_sum(large)
    for place, noticed in seen.items():
        with large.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert (file_sum(large) != before) == noticed, place
        before = file_sum(large)


def test_a_local_dataset_is_its_files_of_the_split(tmp_path: Path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n')
    for streaming in (False, True):
        config = DataConfig(
            source=Source.hub, name=str(tmp_path), split="train[:50%]", streaming=streaming
        )
        found = find_sources(config)
        assert [file.name for file in found.files] == ["train.jsonl"] and found.revision is None
    before = found.record()
    (tmp_path / "train.jsonl").write_text('{"text": "two"}\n')
    assert difference(before, find_sources(config).record()) == "train.jsonl has other contents"


def test_another_revision_of_a_dataset_is_told():
    first, second = (sources.Sources((), revision, None).record() for revision in ("abc", "def"))
    assert difference(first, second) == "revision def, was abc"


def test_a_file_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Permissions say nothing to root, under whom tests may run."""

    def denied(path: str, mode: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(sources, "open", denied, raising=False)
    with pytest.raises(ConfigError) as error:
        record(folder)
    assert str(error.value) == f"data.path={folder}/a.txt: cannot be read: Permission denied"
    monkeypatch.undo()
    config = DataConfig(source=Source.text, path=(f"{folder}/*.txt",))
    monkeypatch.setattr(sources, "local_files", lambda patterns: [f"{folder}/gone.txt"])
    with pytest.raises(ConfigError, match=r"gone\.txt: is no longer there"):
        find_sources(config)
