"""Corpora that Megatron-LM has tokenized: pairs of files, mapped into memory as they are.

    NAME.bin   ids, document after document
    NAME.idx   magic (9 bytes), version u64, type u8, count of sequences u64, count of borders u64,
               lengths of sequences i32, their first bytes in NAME.bin i64,
               borders i64: document d holds the sequences borders[d] to borders[d + 1] - 1

Everything is little-endian (`IndexedDataset` of megatron/core/datasets/indexed_dataset.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from app.choices import BadFile
from app.config import DataConfig
from app.data.corpus import Written
from app.data.faults import Fault
from app.data.packing import Documents
from app.data.paths import BIN, index_of, source_option
from app.data.sources import Sources, unreadable
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
INTEGERS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # by code
FLOATS = {6: "float64", 7: "float32"}
CHUNK = 2**24  # ids that are looked at together


@dataclass(frozen=True, slots=True)
class Pair:
    """The ids of a .bin, and which of them are a document."""

    ids: np.ndarray  # [T], mapped
    bounds: np.ndarray  # [D + 1]: document d holds the ids bounds[d] to bounds[d + 1] - 1

    @classmethod
    def open(cls, path: str) -> Pair:
        """Map a .bin by the .idx beside it. Raises Fault and OSError."""
        name = os.path.basename(index_of(path))
        try:
            index = np.memmap(index_of(path), np.uint8, mode="r")
        except FileNotFoundError:
            raise Fault(f"there is no {name} beside it") from None
        except ValueError:  # an empty file cannot be mapped
            raise Fault(f"{name} has 0 bytes") from None
        size = os.path.getsize(path)
        dtype, starts = _layout(name, index, size)
        return cls(np.memmap(path, dtype, mode="r"), starts)

    def check(self, vocab_size: int, of: str) -> None:
        """Raise Fault for an id that a vocabulary does not have. Reads all ids."""
        for start in range(0, len(self.ids), CHUNK):
            part = self.ids[start : start + CHUNK]
            if part.min() >= 0 and part.max() < vocab_size:
                continue
            place = start + int(np.flatnonzero((part < 0) | (part >= vocab_size))[0])
            document = int(np.searchsorted(self.bounds, place, side="right"))
            rule = f"document {document} has the id {self.ids[place]}"
            rule += f", and {of} has {vocab_size} ids"
            raise Fault(rule, advice="give the tokenizer of these files: data.tokenizer=FILE")

    def open_end(self, eod: int) -> int | None:
        """Number, from 1, of the first document that does not end with this id; None: all do."""
        held = np.flatnonzero(np.diff(self.bounds))
        others = held[self.ids[self.bounds[held + 1] - 1] != eod]
        return int(others[0]) + 1 if len(others) else None


def _layout(name: str, index: np.ndarray, size: int) -> tuple[str, np.ndarray]:
    """Type of the ids and borders of documents for a .bin of `size` bytes. Raises Fault."""
    if len(index) < HEADER.size or bytes(index[: len(MAGIC)]) != MAGIC:
        raise Fault(f"{name} is not an index of Megatron: it does not begin with MMIDIDX")
    _, version, code, sequences, borders = HEADER.unpack(bytes(index[: HEADER.size]))
    if version != VERSION:
        raise Fault(f"{name} has version {version}, and only {VERSION} is read")
    if (dtype := INTEGERS.get(code)) is None:
        raise Fault(f"{name} has ids of type {FLOATS.get(code, code)}, not of integers")
    expected = HEADER.size + 12 * sequences + 8 * borders
    if sequences and len(index) == expected + sequences:
        raise Fault(f"{name} has modes of sequences, of several modalities, which are not read")
    if len(index) != expected:
        raise Fault(f"{name} has {len(index)} bytes, and {expected} by its header")
    places = [HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences, expected]
    parts = [index[start:stop] for start, stop in pairwise(places)]
    lengths, pointers, documents = (
        part.view(kind) for part, kind in zip(parts, ("<i4", "<i8", "<i8"), strict=True)
    )
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    width = np.dtype(dtype).itemsize
    if starts[-1] * width != size:
        raise Fault(f"has {size} bytes, and {starts[-1] * width} by {name}")
    if not starts[-1]:
        raise Fault("has no tokens")
    if lengths.min() < 0 or not np.array_equal(pointers, starts[:-1] * width):
        raise Fault(f"{name} has sequences that do not follow one another")
    ascending = borders and documents[0] == 0 and documents[-1] == sequences
    if not ascending or np.diff(documents).min(initial=0) < 0:
        raise Fault(f"{name} has documents that do not follow one another")
    return dtype, starts[documents]


def check_pairs(config: DataConfig, tokenizer: Tokenizer, sources: Sources) -> Written:
    """Read all pairs of files once; they stay where they are.

    Raises ConfigError for the first that is bad, or if data.on_bad_file leaves out all.
    """
    mapped: list[str] = []
    left_out: list[tuple[str, str]] = []
    open_end: tuple[str, int] | None = None
    for path in (file.path for file in sources.files if file.path.endswith(BIN)):
        try:
            pair = Pair.open(path)
            pair.check(tokenizer.vocab_size, f"data.tokenizer={config.tokenizer}")
        except (Fault, OSError) as error:
            if config.on_bad_file is not BadFile.skip:
                raise _refusal(path, error) from error
            left_out.append((path, str(error)))
            continue
        mapped.append(path)
        if open_end is None and (document := pair.open_end(tokenizer.eod)) is not None:
            open_end = path, document
    if not mapped:
        bad = [*sources.unreadable, *left_out]
        rule = f"no file of {len(bad)} can be read: {': '.join(bad[0])}"
        raise ConfigError(*source_option(config), rule)
    return Written((), tuple(left_out), mapped=tuple(mapped), open_end=open_end)


def _refusal(path: str, error: Fault | OSError) -> ConfigError:
    if isinstance(error, OSError):
        return unreadable("data.path", path, error)
    return ConfigError("data.path", path, error.rule, advice=error.advice)


def map_pairs(paths: Sequence[str]) -> Documents:
    """The documents of .bin files that `check_pairs` has read, without empty ones."""
    chunks: list[np.ndarray] = []
    chunk_D, start_D, lengths_D = [], [], []
    for path in paths:
        pair = Pair.open(path)
        lengths = np.diff(pair.bounds)
        # Chunks begin with a document, so that what reads all ids does it part by part.
        group_D = pair.bounds[:-1] // CHUNK
        firsts, own_D = np.unique(group_D, return_index=True, return_inverse=True)[1:]
        begins = pair.bounds[firsts]
        ends = [*begins[1:].tolist(), len(pair.ids)]
        chunk_D.append(own_D + len(chunks))
        start_D.append(pair.bounds[:-1] - begins[own_D])
        lengths_D.append(lengths)
        chunks += [pair.ids[a:b] for a, b in zip(begins.tolist(), ends, strict=True)]
    whole = Documents(
        tuple(chunks),
        np.concatenate(chunk_D),
        np.concatenate(start_D),
        lengths_D=np.concatenate(lengths_D),
    )
    return whole.select(whole.lengths_D > 0)
