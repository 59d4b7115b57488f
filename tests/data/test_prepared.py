"""The cache of prepared corpora is never believed: not when it is broken, and not when files
have changed.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data import corpus, prepared
from app.data.load import load_data, prepare
from app.data.packing import PackedSequences
from app.data.sources import find_sources
from app.data.tokenizer import load_tokenizer
from app.errors import ConfigError
from tests.data.conftest import write_jsonl

TOKENIZER = load_tokenizer("bytes")
SOURCES = ("text", "jsonl", "parquet", "hub")


def write(kind: str, folder: Path, texts: list[str]) -> DataConfig:
    """One file of a kind, two of plain text."""
    folder.mkdir(exist_ok=True)
    place = {"path": (f"{folder}/*",)}
    if kind == "parquet":
        parquet.write_table(pa.table({"text": texts}), folder / "a.parquet")
    elif kind == "text":
        for number, text in enumerate(("\n".join(texts[::2]), "\n".join(texts[1::2]))):
            (folder / f"{number}.txt").write_text(text)
    else:
        write_jsonl(folder / "train.jsonl", texts)
        place = place if kind == "jsonl" else {"name": str(folder)}
    return DataConfig(source=Source(kind), cache_dir=f"{folder.parent}/cache", **place)


def tokens(config: DataConfig) -> list[int]:
    train, _ = load_data(config, 16, 1, tokenizer=TOKENIZER)
    assert isinstance(train.sequences, PackedSequences)
    return train.sequences.tokens(10**6).tolist()


def cut_to(size: int) -> Callable[[Path], object]:
    return lambda file: os.truncate(file, size)


def without_last_batch(file: Path) -> None:
    """As one would look that was cut where a part ends: the format has no sign of it."""
    with pa.ipc.open_stream(file.read_bytes()) as stream:
        batches = list(stream)
        schema = stream.schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches[:-1]:
            writer.write_batch(batch)


def turn_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (cut_to(0), "tokens.arrow has 0 bytes instead of"),
    "cut": (cut_to(100), "tokens.arrow has 100 bytes instead of"),
    "batch": (without_last_batch, r"tokens.arrow has \d+ bytes instead of"),
    "bit": (turn_a_bit, "tokens.arrow has other contents"),
    "gone": (Path.unlink, "tokens.arrow cannot be read"),
    "contents": (
        lambda file: (file.parent / "contents.json").write_text(""),
        "contents.json is not what was written",
    ),
    "no contents": (
        lambda file: (file.parent / "contents.json").unlink(),
        "contents.json cannot be read",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_broken_cache_is_made_anew_and_said(
    name: str, tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
):
    spoil, told = SPOILT[name]
    config = write("jsonl", tmp_path / "data", texts)
    before = tokens(config)
    assert capsys.readouterr().out == ""
    (file,) = (tmp_path / "cache").rglob("tokens.arrow")
    spoil(file)
    assert tokens(config) == before
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(f"prepared again, since {file.parent} is not whole: {told}.*", line)
    assert tokens(config) == before and capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", SOURCES)
def test_changed_file_of_equal_time_and_size_is_read_anew(
    kind: str, tmp_path: Path, texts: list[str]
):
    """The contents count, whatever the file system says of them; and back again."""
    config = write(kind, tmp_path / "data", texts)
    first, times = tokens(config), {file: file.stat() for file in (tmp_path / "data").iterdir()}
    write(kind, tmp_path / "data", [text.upper() for text in texts])
    for file, facts in times.items():
        os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    changed = tokens(config)
    assert changed == [*map(ord, "".join(map(chr, first)).upper())] != first


def test_files_that_have_moved_are_not_prepared_twice(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    config = write("text", tmp_path / "data", texts)
    folder = prepare(config, TOKENIZER)
    (tmp_path / "data").rename(tmp_path / "moved")
    monkeypatch.setattr(prepared, "TokenWriter", None)
    moved = DataConfig(
        source=Source.text, path=(f"{tmp_path}/moved/*",), cache_dir=config.cache_dir
    )
    assert prepare(moved, TOKENIZER) == folder


def test_a_file_that_changes_while_it_is_read_is_told(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    config = write("jsonl", tmp_path / "data", texts)
    found = find_sources(config)
    with (tmp_path / "data/train.jsonl").open("a") as file:
        file.write('{"text": "late"}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl: was changed while it was read"):
        prepare(config, TOKENIZER, found)
    assert not list((tmp_path / "cache/graphfold").glob("*/"))


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, texts: list[str]):
    config = write("jsonl", tmp_path / "data", texts)
    folder = prepare(config, TOKENIZER)
    assert folder
    (folder.with_name(f".{folder.name}.partial") / "raw").mkdir(parents=True)
    os.truncate(folder / "tokens.arrow", 0)
    prepare(config, TOKENIZER)
    assert [path.name for path in sorted(folder.parent.iterdir())] == [
        f".{folder.name}.lock",
        folder.name,
    ]
    assert sorted(path.name for path in folder.iterdir()) == ["contents.json", "tokens.arrow"]


def test_a_full_disk_is_one_line(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch):
    def full(*facts: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = write("jsonl", tmp_path / "data", texts)
    monkeypatch.setattr(corpus, "KEPT", 1)
    monkeypatch.setattr(corpus.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*: cannot be written: No space left"):
        prepare(config, TOKENIZER)
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*: cannot be written: No space left"):
        prepare(config, TOKENIZER)


GOOD = "".join(json.dumps({"text": f"document number {n}"}) + "\n" for n in range(20)).encode()
# kind of source, bytes of its second file, what is said of that
FAULTS: dict[str, tuple[str, bytes, str]] = {
    "text": ("text", b"caf\xe9", "is not UTF-8: byte 0xe9 at offset 3; convert it to UTF-8"),
    "bytes": (
        "jsonl",
        GOOD + b'{"text": "caf\xe9"}\n',
        f"line 21 is not UTF-8: byte 0xe9 at offset {len(GOOD) + 13}",
    ),
    "cut line": (
        "jsonl",
        GOOD + b'{"text": \n' + GOOD,
        "line 21 is not JSON: Expecting value at character 8",
    ),
    "no object": ("jsonl", GOOD + b"5\n", "line 21 is not an object"),
    "no parquet": ("parquet", b"no", "is not a whole parquet file: Parquet file size is 2 bytes.*"),
    "no bytes": ("parquet", b"", "is not a whole parquet file: Parquet file size is 0 bytes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_file_and_the_place_of_a_fault_are_named(name: str, tmp_path: Path, texts: list[str]):
    kind, content, told = FAULTS[name]
    config = write(kind, tmp_path / "data", texts)
    (tmp_path / "data/zz").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        tokens(config)
    assert re.fullmatch(f"data.path={tmp_path}/data/zz: {told}", str(error.value))


def test_a_cut_parquet_file_is_named(tmp_path: Path, texts: list[str]):
    config = write("parquet", tmp_path / "data", texts * 50)
    whole = (tmp_path / "data/a.parquet").read_bytes()
    (tmp_path / "data/b.parquet").write_bytes(whole[:100] + bytes(200) + whole[300:])
    with pytest.raises(ConfigError) as error:
        tokens(config)
    assert "data/b.parquet: is not a whole parquet file: " in str(error.value)
    assert "\n" not in str(error.value)


def test_empty_lines_files_are_told_where_there_is_nothing_else(tmp_path: Path, texts: list[str]):
    (tmp_path / "a.jsonl").write_bytes(b"")
    config = DataConfig(
        source=Source.jsonl, path=(f"{tmp_path}/*.jsonl",), cache_dir=f"{tmp_path}/cache"
    )
    with pytest.raises(ConfigError) as error:
        tokens(config)
    assert str(error.value) == f"data.path={tmp_path}/*.jsonl: no text: every file has 0 bytes"
    write_jsonl(tmp_path / "b.jsonl", texts)
    assert tokens(config)
