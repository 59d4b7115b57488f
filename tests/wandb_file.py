"""Reads the history rows of an offline Weights & Biases run: a LevelDB log of protobuf records behind a 7-byte header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7  # bytes
FULL, LAST = 1, 4  # kinds of fragments that end a record; the others continue


def records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: fragments of crc (4), length (2), kind (1) and payload that never cross a block."""
    position, parts = HEADER, []
    while position + RECORD_HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < RECORD_HEADER:
            position += left  # a block's tail too short for a header is padding
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts.append(data[position + RECORD_HEADER : position + RECORD_HEADER + length])
        position += RECORD_HEADER + length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def history(run_dir: Path) -> list[dict[str, Any]]:
    """Every logged row of the one offline run in `run_dir`."""
    (file,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item})
    return rows
