"""The documents of local files, one after the other, as UTF-8: text files, JSON lines, parquet.

Nothing of a file is held but the document that is read and a buffer: sizes of corpora do not
matter, and those of documents are bounded.
"""

from __future__ import annotations

import lzma
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence

import pyarrow as pa
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data.faults import STREAMS, Fault, Reading, check_utf8, file_format, without_mark
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


def documents(path: str, config: DataConfig, reading: Reading) -> Iterator[bytes]:
    """Documents of a file, in order; empty where a text is empty, null or missing.

    Raises Fault and OSError.
    """
    yield from readable(_documents(path, config, reading), path, reading)


def readable(found: Iterable[bytes], path: str, reading: Reading) -> Iterator[bytes]:
    """The documents of a file; raises Fault for what is not a whole compressed file."""
    reading.tell = int
    try:
        yield from bounded(found, path, reading)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's; those of decompressors have no number
        raise Fault(f"is not a whole compressed file: {error}") from error


def bounded(found: Iterable[bytes], path: str, reading: Reading) -> Iterator[bytes]:
    """The documents; one that is too long is a bad row."""
    for number, document in enumerate(found, start=1):
        if len(document) > MOST_BYTES:
            rule = f"document {number} has more than {MOST_BYTES >> 20} MiB, the most that is read"
            reading.bad_row(path, Fault(rule, advice="split it"))
        else:
            yield document


def _documents(path: str, config: DataConfig, reading: Reading) -> Iterator[bytes]:
    match config.source:
        case Source.stdlib:
            yield _replaced(path)
        case Source.text:
            try:
                whole = _text(path)
            except Fault as fault:
                reading.bad_row(path, fault)
            else:
                yield whole
        case Source.parquet:
            yield from _parquet_texts(path, config.text_field, reading)
        case _:
            before, reading.keys = reading.keys, set()
            for text in json_texts(path, config.text_field, reading):
                yield text.encode() if isinstance(text, str) else text or b""
            found = reading.keys
            reading.keys = before | found
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
        with opened(path, Reading()) as file:
            return file.read(most)
    return content


def _parquet_texts(path: str, field: str, reading: Reading) -> Iterator[bytes]:
    try:
        with parquet.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file:
            if file.metadata.num_rows == 0:
                return
            _check_column(file.schema_arrow.names, field)
            first, size = 1, os.path.getsize(path)
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                reading.tell = lambda: size * first // file.metadata.num_rows  # noqa: B023
                yield from _group_texts(file, group, first, path=path, field=field, reading=reading)
                first += rows
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        advice = None
        with open(path, "rb") as content:
            if content.read(16).lstrip().startswith((b"{", b"[")):
                advice = "read JSON lines with data.source=jsonl"
        raise Fault(f"is not a whole parquet file: {_reason(error)}", advice=advice) from error


def _group_texts(
    file: parquet.ParquetFile, group: int, first: int, *, path: str, field: str, reading: Reading
) -> Iterator[bytes]:
    """Texts of a row group whose first row has the number `first`."""
    facts = file.metadata.row_group(group)
    row, last = first, first + facts.num_rows - 1
    at_once = rows_at_once(facts.total_byte_size, facts.num_rows)
    try:
        for batch in file.iter_batches(at_once, [group], [field], use_threads=False):
            for text in texts_of(batch.column(0), field):
                row += 1
                if (fault := text_fault(text, row - 1)) is None:
                    yield text or b""
                else:
                    reading.bad_row(path, fault)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        rule = f"is not a whole parquet file: rows {row} to {last}: {_reason(error)}"
        reading.bad_row(path, Fault(rule), last + 1 - row)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


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


def text_fault(text: bytes | None, row: int) -> Fault | None:
    """What is wrong with the value of a row: that it is not UTF-8."""
    try:
        check_utf8(text or b"")
    except Fault as fault:
        return Fault(f"row {row} {fault.rule}")
    return None
