"""Pairs of .bin and .idx files read as Megatron-LM writes them, and what is said of bad ones."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from app.choices import BadFile, Source
from app.cli.options.compose import load_overrides
from app.config import DataConfig
from app.data import megatron
from app.data.load import load_data, prepare
from app.data.packing import PackedSequences
from app.data.prepared import left_out, map_tokens
from app.data.sources import find_sources
from app.data.tokenizer import ByteTokenizer
from app.errors import ConfigError

TOKENIZER = ByteTokenizer()  # 257 ids, the last one ends a document
CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.float32: 7,
         np.uint16: 8}  # fmt: skip


def write(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type = np.uint16
) -> None:
    """Documents of sequences of ids, in Megatron's own layout."""
    sequences = [np.array(ids, dtype) for ids in itertools.chain(*documents)]
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    borders = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, CODES[dtype], len(sequences), len(borders))
    pointers = np.concatenate(([0], ends))[: len(sequences)]
    path.with_suffix(".idx").write_bytes(
        header + lengths.tobytes() + pointers.astype(np.int64).tobytes() + borders.tobytes()
    )


def corpus(folder: Path, pattern: str = "*", **options: object) -> DataConfig:
    return DataConfig(
        source=Source.megatron,
        path=(f"{folder}/d/{pattern}",),
        cache_dir=f"{folder}/cache",
        **options,
    )


def read(config: DataConfig) -> list[list[int]]:
    folder = prepare(config, TOKENIZER)
    assert folder
    found = map_tokens(folder)
    return [found.read(n, 0, int(size)).tolist() for n, size in enumerate(found.lengths_D)]


def refused(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as error:
        read(config)
    return str(error.value)


TEXTS = [[[72, 105], [33, 256]], [], [[1, 2, 3, 4, 256]], [[256]], [[], [9, 256]]]
FLAT = [[72, 105, 33, 256], [1, 2, 3, 4, 256], [256], [9, 256]]


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int32, np.int64])
def test_documents_are_those_of_the_index(dtype: type, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(megatron, "CHUNK", 4)
    write(tmp_path / "d/b", TEXTS, dtype)
    write(tmp_path / "d/a", [[[7, 256]]], np.uint16)
    assert read(corpus(tmp_path)) == [[7, 256], *FLAT]
    for pattern in ("b", "b.bin", "b.idx"):  # as Megatron names a pair, or by a file of it
        assert read(corpus(tmp_path, pattern)) == FLAT


def test_small_ids_fit_into_bytes(tmp_path: Path):
    write(tmp_path / "d/a", [[[7, 200]], [[3]]], np.uint8)
    write(tmp_path / "d/b", [[[7, 100]]], np.int8)
    assert read(corpus(tmp_path)) == [[7, 200], [3], [7, 100]]


def test_no_token_is_copied(tmp_path: Path):
    write(tmp_path / "d/a", TEXTS)
    folder = prepare(corpus(tmp_path), TOKENIZER)
    assert folder and [path.name for path in folder.iterdir()] == ["contents.json"]
    (chunk,) = map_tokens(folder).chunks
    assert isinstance(chunk, np.memmap) and chunk.dtype == np.uint16


def test_sequences_equal_those_of_the_same_text(tmp_path: Path):
    """Bytes tokenized by Megatron, and by us."""
    texts = [f"document {n} " * (1 + n % 5) for n in range(40)]
    write(tmp_path / "d/a", [[[*text.encode(), 256]] for text in texts])
    (tmp_path / "t").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / f"t/{number:02}.txt").write_text(text)
    own = DataConfig(source=Source.text, path=(f"{tmp_path}/t/*",), cache_dir=f"{tmp_path}/cache")
    for masked in (False, True):
        found = [
            load_data(config, 32, 1, tokenizer=TOKENIZER)
            for config in (
                corpus(tmp_path, document_mask=masked),
                DataConfig(**{**vars(own), "document_mask": masked}),
            )
        ]
        for theirs, ours in zip(*found, strict=True):
            assert isinstance(theirs.sequences, PackedSequences)
            assert isinstance(ours.sequences, PackedSequences)
            for index in range(3 * theirs.sequences.per_epoch):
                sample = theirs.sequences.sample(index)
                np.testing.assert_array_equal(sample, ours.sequences.sample(index))


def put(name: str, start: int, new: bytes) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[start : start + len(new)] = new
        (folder / name).write_bytes(content)

    return change


def cut(name: str, by: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-by])


def grown(name: str, by: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + bytes(by))


FAULTS: dict[str, Callable[[Path], object]] = {
    "has 22 bytes, and 24 by a.idx": cut("a.bin", 2),
    "has 26 bytes, and 24 by a.idx": grown("a.bin", 2),
    "a.idx has 153 bytes, and 154 by its header": cut("a.idx", 1),
    "a.idx is not an index of Megatron: it does not begin with MMIDIDX": put("a.idx", 0, b"NN"),
    "a.idx has 0 bytes": lambda folder: (folder / "a.idx").write_bytes(b""),
    "a.idx has version 2, and only 1 is read": put("a.idx", 9, b"\2"),
    "a.idx has ids of type float32, not of integers": put("a.idx", 17, b"\7"),
    "a.idx has ids of type 9, not of integers": put("a.idx", 17, b"\x09"),
    "there is no a.idx beside it": lambda folder: (folder / "a.idx").unlink(),
    "a.idx has sequences that do not follow one another": put("a.idx", 34 + 6 * 4 + 8, b"\6"),
    "a.idx has documents that do not follow one another": put("a.idx", 34 + 6 * 12 + 8, b"\7"),
    "a.idx has modes of sequences, of several modalities, which are not read": grown("a.idx", 6),
    "document 3 has the id 257, and data.tokenizer=bytes has 257 ids; give the tokenizer of these "
    "files: data.tokenizer=FILE": put("a.bin", 2 * 5, b"\1\1"),
}


@pytest.mark.parametrize("told", FAULTS, ids=lambda told: told[:25])
def test_faults_of_a_pair_are_named(told: str, tmp_path: Path):
    write(tmp_path / "d/a", TEXTS)
    write(tmp_path / "d/b", [[[5, 256]]])
    FAULTS[told](tmp_path / "d")
    assert refused(corpus(tmp_path)) == f"data.path={tmp_path}/d/a.bin: {told}"
    skipping = corpus(tmp_path, on_bad_file=BadFile.skip)
    assert read(skipping) == [[5, 256]]
    folder = prepare(skipping, TOKENIZER)
    assert folder
    line = left_out(folder, find_sources(skipping))
    assert line and told.split(";")[0] in line
    alone = refused(corpus(tmp_path, "a", on_bad_file=BadFile.skip))
    assert "no file of 1 can be read" in alone and told.split(";")[0] in alone


def test_empty_pairs_have_no_tokens(tmp_path: Path):
    write(tmp_path / "d/a", [[], []])
    assert refused(corpus(tmp_path)).endswith("a.bin: has no tokens")


def test_negative_ids_are_refused(tmp_path: Path):
    write(tmp_path / "d/a", [[[5, 256]], [[-1, 256]]], np.int32)
    assert "a.bin: document 2 has the id -1, and" in refused(corpus(tmp_path))


def test_masked_documents_need_their_ends(tmp_path: Path):
    write(tmp_path / "d/a", [[[*range(1, 40), 256]], [[*range(12)]], [[*range(50)]]])
    load_data(corpus(tmp_path), 8, 1, tokenizer=TOKENIZER)
    told = r"a.bin: document 2 does not end with the end-of-document token .*, as data.doc"
    with pytest.raises(ConfigError, match=told):
        load_data(corpus(tmp_path, document_mask=True), 8, 1, tokenizer=TOKENIZER)


def test_changed_pairs_are_noticed(tmp_path: Path):
    write(tmp_path / "d/a", TEXTS)
    before = find_sources(corpus(tmp_path)).record()
    write(tmp_path / "d/a", [*TEXTS[:2], [[1, 2], [3, 4, 256]], *TEXTS[3:]])
    assert find_sources(corpus(tmp_path)).record()["sum"] != before["sum"]  # by the index alone


def test_keys_of_texts_are_refused():
    with pytest.raises(ConfigError, match=r"is not read by data=megatron, whose documents are"):
        load_overrides(["data=megatron", "data.path=x", "data.text_field=x"])
    with pytest.raises(ConfigError, match=r"data=megatron\?"):
        DataConfig(path=("corpus/a.bin",))
