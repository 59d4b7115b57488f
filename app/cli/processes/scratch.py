"""Temporary folders that are removed even after their program was killed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = ".graphfold-torchrun-"
NAMES = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # names that mkdtemp makes of the prefix
OURS = "temporary-files-of-a-launcher"  # marker file: folders without it are not ours to remove


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder in the system's temporary folder, removed after the block.

    Also removes the folders of earlier programs that were killed.
    """
    _remove_left()
    while (made := _made()) is None:
        pass
    folder, held = made
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _made() -> tuple[Path, int] | None:
    """Make a folder and lock it; return it with the open handle that holds the lock. None if
    another program removed it before it was locked.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with suppress(FileNotFoundError):
        held = os.open(folder, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            (folder / OURS).touch()
            return folder, held
        os.close(held)
    return None


def _remove_left() -> None:
    """Remove this user's folders that no living program has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another program may remove it at the same time
            ours = NAMES.fullmatch(folder.name) and (folder / OURS).is_file()
            if ours and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(handle)
