"""Write and read files in folders that others can write to, such as run folders.

A file is replaced as a whole: written under a hidden name beside it, then renamed. A link or pipe
of that name is replaced itself, and what a link or a second name (hard link) leads to stays as it
is. Linked folders are followed, because people keep runs and checkpoints on other disks.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NEVER_WAIT = os.O_NONBLOCK | os.O_CLOEXEC  # for a writer or reader of a pipe


def read_regular(path: Path) -> bytes:
    """Return the contents of a regular file. Raises OSError, also for a pipe or a device."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or one that a link leads to, for reading. Raises OSError, also for a
    pipe or a device, which could block.
    """
    return os.fdopen(_regular(os.open(path, os.O_RDONLY | NEVER_WAIT), path), "rb")


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file by one with this content, text as UTF-8. Raises OSError."""
    with replaced(path) as temporary, fresh_file(temporary) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a free hidden path with the suffix of `path`; what the block writes there replaces
    the file at `path`. Raises OSError, also if a folder is there.
    """
    temporary = path.with_name(f".{path.name}.tmp{path.suffix}")
    _free(temporary)  # one that a killed process has left
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def fresh_file(path: Path) -> BinaryIO:
    """Create an empty file for writing; a file, link or pipe of that name is removed first. Raises
    OSError, also for a folder or a device.
    """
    _free(path)
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, new, 0o666), "wb")


def open_own(path: Path, *, append: bool) -> int:
    """Return a handle of a regular file for writing in place; create it if there is none.

    append: after what it holds; otherwise it is emptied. Raises OSError, also for a link, a pipe,
    or a file with a second name.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | NEVER_WAIT | (os.O_APPEND if append else 0)
    handle = _regular(os.open(path, flags, 0o666), path)
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise OSError(errno.EMLINK, "Has a second name (hard link)", str(path))
    if not append:
        os.ftruncate(handle, 0)
    return handle


def make_own(path: Path) -> None:
    """Replace a link, or a file with a second name, by a copy that `open_own` accepts; a pipe or
    a link to nothing by an empty file. No-op for other files and for none. Raises OSError.
    """
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return
        with replaced(path) as temporary, fresh_file(temporary) as copy:
            if path.is_file():
                with open_regular(path) as file:
                    shutil.copyfileobj(file, copy)


def _free(path: Path) -> None:
    """Remove the file, link or pipe at a path. Raises OSError for a folder or a device."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            raise OSError(errno.EINVAL, "Is a device", str(path))
        os.unlink(path)


def _regular(handle: int, path: Path) -> int:
    """Return the handle of a regular file; close that of anything else and raise OSError."""
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Is no regular file", str(path))
