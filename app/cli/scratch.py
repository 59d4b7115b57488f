"""Folders for temporary files that nobody has to clear away."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "graphfold_"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder among the system's temporary ones, gone after the block.

    What a program that was killed has left there goes too, with the next one's first.
    """
    _remove_left()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        if folder.exists():  # between those two calls another start may have taken it for left
            break
        os.close(held)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left() -> None:
    """Remove this user's folders that no living program holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another start removes it
            if folder.stat(follow_symlinks=False).st_uid == os.getuid() and not folder.is_symlink():
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(handle)
