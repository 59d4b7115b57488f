"""Reads an offline Weights & Biases run: a LevelDB log of protobuf messages behind 7 bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK, RECORD_HEADER = 7, 32768, 7  # bytes
FULL, LAST = 1, 4  # kinds of fragments that end a record; the others continue


def records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log: fragments of crc (4), length (2), kind (1) and payload that
    never cross a block.
    """
    position, parts = HEADER, []
    while position + RECORD_HEADER <= len(data):
        left = BLOCK - position % BLOCK
        if left < RECORD_HEADER:
            position += left  # a block's tail too short for a header is padding
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        parts.append(data[position + RECORD_HEADER : position + RECORD_HEADER + length])
        position += RECORD_HEADER + length
        if kind in (FULL, LAST):
            yield b"".join(parts)
            parts = []


def told(run_dir: Path, kind: str) -> list[Any]:
    """The records of one kind of the one offline run in `run_dir`."""
    from wandb.proto import wandb_internal_pb2  # most of a second, when it is needed

    (file,) = (run_dir / "wandb").glob("offline-run-*/*.wandb")
    found = map(wandb_internal_pb2.Record.FromString, records(file.read_bytes()))
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def history(run_dir: Path) -> list[dict[str, Any]]:
    """Every logged row."""
    rows = (record.item for record in told(run_dir, "history"))
    return [{_name(item): json.loads(item.value_json) for item in row} for row in rows]


def _name(item: Any) -> str:
    return item.key or "/".join(item.nested_key)
