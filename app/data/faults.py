"""What is wrong with a file that the library could not read: the line, the byte, the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig

GZIP = b"\x1f\x8b"


def fault_in(path: str, config: DataConfig) -> str | None:
    """Read a file until its first fault, which is returned as text; None: it has none."""
    kind = Path(path).suffix.removeprefix(".")
    if config.source is not Source.hub:
        kind = config.source.value
    try:
        if kind == "jsonl":
            return _jsonl_fault(path)
        if kind == "parquet":
            return _parquet_fault(path, config.text_field)
        os.stat(path)
    except FileNotFoundError:
        return "is no longer there, although it has just been listed"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def no_utf8(error: UnicodeDecodeError, start: int = 0) -> str:
    """What is wrong with bytes that begin at offset `start` of a file."""
    return f"is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {start + error.start}"


def _jsonl_fault(path: str) -> str | None:
    offset = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(GZIP):
                return None
            if fault := _line_fault(line, offset):
                return f"line {number} {fault}"
            offset += len(line)
    return None


def _line_fault(line: bytes, offset: int) -> str | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line.decode("utf-8-sig" if not offset else "utf-8").rstrip())
    except UnicodeDecodeError as error:
        return no_utf8(error, offset)
    except json.JSONDecodeError as error:
        return f"is not JSON: {error.msg} at character {error.pos}"
    return None if isinstance(row, dict) else "is not an object"


def _parquet_fault(path: str, field: str) -> str | None:
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                return f"has no column {field}; there are {', '.join(file.schema_arrow.names)}"
            for group in range(file.num_row_groups):
                file.read_row_group(group, columns=[field])
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        return f"is not a whole parquet file: {' '.join(str(error).split())}"
    return None
