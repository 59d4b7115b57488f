"""The documents of local files, one after the other, as UTF-8: text files, JSON lines, parquet.

Nothing of a file is held but the document that is read and a buffer: sizes of corpora do not
matter, and those of documents are bounded.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data.faults import STREAMS, Fault, check_utf8, file_format, without_mark
from app.data.json_lines import json_texts, opened

MOST_BYTES = 2**28  # of a document
BATCH_BYTES = 2**22  # of rows of parquet that are read at once, by the mean of their row group
BATCH_ROWS = 256  # at most: texts that repeat are stored once, and their mean tells little
BUFFER = 2**20  # bytes read at once

TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)


class ColumnFault(Fault):
    """A column that is not there or holds no text: of this file, or of all where it is the
    first."""

    def __init__(self, rule: str, of_all: str, names: Iterable[str] = ()) -> None:
        super().__init__(rule)
        self.of_all = of_all  # what is said about data.text_field
        self.names = tuple(names)  # columns that are there


def documents(path: str, config: DataConfig, keys: set[str]) -> Iterator[bytes]:
    """Documents of a file, in order; empty where a text is empty, null or missing.

    Adds the keys of the first JSON object to `keys`. Raises Fault and OSError.
    """
    yield from readable(_documents(path, config, keys))


def readable(found: Iterable[bytes]) -> Iterator[bytes]:
    """The documents of a file; raises Fault for what is too long or not a whole compressed file."""
    try:
        yield from bounded(found)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's; those of decompressors have no number
        raise Fault(f"is not a whole compressed file: {error}") from error


def bounded(found: Iterable[bytes]) -> Iterator[bytes]:
    """The documents; raises Fault for one that is too long."""
    for number, document in enumerate(found, start=1):
        if len(document) > MOST_BYTES:
            rule = f"document {number} has more than {MOST_BYTES >> 20} MiB, the most that is read"
            raise Fault(rule, advice="split it")
        yield document


def _documents(path: str, config: DataConfig, keys: set[str]) -> Iterator[bytes]:
    match config.source:
        case Source.stdlib:
            yield _replaced(path)
        case Source.text:
            yield _text(path)
        case Source.parquet:
            yield from _parquet_texts(path, config.text_field)
        case _:
            found: set[str] = set()
            for text in json_texts(path, config.text_field, found):
                yield text.encode() if isinstance(text, str) else text or b""
            keys |= found
            if found:
                _check_key(found, config.text_field)


def _replaced(path: str) -> bytes:
    """A file as it is; Python's own tests have files that are not UTF-8 on purpose."""
    with open(path, "rb") as file:
        return file.read(MOST_BYTES + 1).decode("utf-8", errors="replace").encode()


def _text(path: str) -> bytes:
    content = _unpacked(path)
    text = without_mark(content)
    if len(text) > MOST_BYTES:
        return text
    if text[257:262] == b"ustar":  # else it would be read as text, with zeros
        raise Fault("is a tar archive, not text", advice="unpack it")
    try:
        check_utf8(text, len(content) - len(text))
    except Fault:
        if (found := file_format(content)) is None:
            raise
        advice = "read it with data.source=parquet" if found == "parquet" else "unpack it"
        raise Fault(f"is a {found} file, not text", advice=advice) from None
    return text


def _unpacked(path: str) -> bytes:
    """The first bytes of a text, more than MOST_BYTES only of one that is too long."""
    most = MOST_BYTES + 4  # a mark does not count
    with open(path, "rb") as file:
        content = file.read(most)
    if file_format(content) not in STREAMS:
        return content
    try:
        check_utf8(content)  # a text may begin with "BZh"
    except Fault:
        with opened(path) as file:
            return file.read(most)
    return content


def _parquet_texts(path: str, field: str) -> Iterator[bytes]:
    try:
        with parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file:
            if file.metadata.num_rows == 0:
                return
            _check_column(file.schema_arrow.names, field)
            done = 0
            for group in range(file.num_row_groups):
                facts = file.metadata.row_group(group)
                rows = rows_at_once(facts.total_byte_size, facts.num_rows)
                for batch in file.iter_batches(rows, [group], [field], use_threads=False):
                    for row, text in enumerate(texts_of(batch.column(0), field), start=done + 1):
                        yield checked_text(text, row)
                    done += len(batch)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        advice = None
        with open(path, "rb") as content:
            if content.read(16).lstrip().startswith((b"{", b"[")):
                advice = "read JSON lines with data.source=jsonl"
        reason = " ".join(str(error).split())
        raise Fault(f"is not a whole parquet file: {reason}", advice=advice) from error


def _check_key(found: Collection[str], field: str) -> None:
    """Raise ColumnFault for a file of which no object has a text."""
    there = ", ".join(sorted(found)) or "none"
    if field not in found:
        of_all = f"no such column; there are {there}"
        raise ColumnFault(f"has no object with the key {field}; there are {there}", of_all, found)


def _check_column(names: Sequence[str], field: str) -> None:
    there = ", ".join(names) or "none"
    if field not in names:
        of_all = f"no such column; there are {there}"
        raise ColumnFault(f"has no column {field}; there are {there}", of_all, names)
    if names.count(field) > 1:
        raise Fault(f"has {names.count(field)} columns {field}")


def rows_at_once(size: int, rows: int) -> int:
    """Rows of a table of `size` bytes that have about BATCH_BYTES."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES * rows // max(1, size)))


def texts_of(column: pa.Array, field: str) -> list[bytes | None]:
    """Values of a column, of any of the types that texts are written in."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.null_count == len(column):
        return [None] * len(column)
    if not any(is_text(column.type) for is_text in TEXT_TYPES):
        held = f"holds {column.type}, not text"
        raise ColumnFault(f"{held}, in column {field}", held)
    found: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return found


def checked_text(text: bytes | None, row: int) -> bytes:
    """A value of a row, empty for null. Raises Fault where it is not UTF-8."""
    if text is None:
        return b""
    try:
        check_utf8(text)
    except Fault as fault:
        raise Fault(f"row {row} {fault.rule}") from None
    return text
