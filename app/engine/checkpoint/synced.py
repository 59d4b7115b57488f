"""Write files and folders that are on disk (fsync) when a call returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.engine.checkpoint.tensor_file import Writable
from app.own_files import fresh_file


class _Summed:
    """File wrapper that counts and hashes the bytes written."""

    def __init__(self, file: Writable) -> None:
        self.file = file
        self.bytes = 0
        self.sha256 = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self.file.write(data)
        self.bytes += len(data)
        self.sha256.update(data)


def write_synced(path: Path, write: Callable[[Writable], object]) -> dict[str, Any]:
    """Write a file and wait until it is on the disk.

    Returns the number of bytes passed to it and their sha256, not those read back.
    """
    with fresh_file(path) as file:
        summed = _Summed(file)
        write(summed)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": summed.bytes, "sha256": summed.sha256.hexdigest()}


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
