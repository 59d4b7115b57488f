"""Folders for temporary files that nobody has to clear away."""

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
NAMES = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}")  # that mkdtemp makes of it
OURS = "temporary-files-of-a-launcher"  # a file in each: what lacks it is somebody else's


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder among the system's temporary ones, gone after the block.

    What a program that was killed has left there goes too, with the next one's first.
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
    """A folder and the handle that holds it; None where another start has removed it meanwhile."""
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
    """Remove this user's folders that no living program holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another start removes it
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
