"""What is wrong with a file, and what its first bytes say that it is.

Imports nothing large: programs that read a few lines of text use it too.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from dataclasses import dataclass, field

PROBE = 2**20  # bytes that are decoded at once where only their validity is asked

# Marks of the byte order at the beginning of a text; UTF-32's begins with UTF-16's.
_WIDE = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
# First bytes of files that hold no text as it is, and what these files are.
_FORMATS = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "Arrow"),
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bz2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
)
MOST_TEXT = 300  # characters of what a library says
STREAMS = ("gzip", "bz2", "xz", "zstd", "lz4")  # compressed, of one file each


def in_one_line(text: str) -> str:
    """Return what a library says as one line of at most MOST_TEXT characters."""
    return " ".join(text.split())[:MOST_TEXT]


class Fault(ValueError):
    """A fault of a file, in words; `advice` says what to do about it, as an imperative."""

    def __init__(self, rule: str, advice: str | None = None) -> None:
        super().__init__(rule)
        self.rule = rule
        self.advice = advice

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by arguments: files may be read in another process."""
        return type(self), (self.rule, self.advice)


@dataclass(slots=True)
class Reading:
    """What is found while files are read, one after the other."""

    skips_rows: bool = False  # data.on_bad_file=skip_rows
    keys: set[str] = field(default_factory=set)  # of the first object of JSON lines
    # count of rows that were left out, and the first fault, by file
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)
    tell: Callable[[], int] = int  # bytes of the present file that were read

    def bad_row(self, path: str, fault: Fault, rows: int = 1) -> None:
        """Count rows that are left out, or raise their fault."""
        if not self.skips_rows:
            raise fault
        count, first = self.bad_rows.get(path, (0, fault.rule))
        self.bad_rows[path] = count + rows, first


def file_format(head: bytes) -> str | None:
    """Name of the binary format that a file's first bytes announce; None for all else."""
    return next((name for magic, name in _FORMATS if head.startswith(magic)), None)


def without_mark(text: bytes) -> bytes:
    """The text of a file without the byte order mark of UTF-8. Raises Fault for a wider coding."""
    for mark, name in _WIDE:
        if text.startswith(mark):
            raise Fault(f"is {name}, by its byte order mark", advice="convert it to UTF-8")
    return text.removeprefix(codecs.BOM_UTF8)


def no_utf8(error: UnicodeDecodeError, start: int = 0) -> Fault:
    """What is wrong with bytes that begin at offset `start` of a file."""
    place = f"byte 0x{error.object[error.start]:02x} at offset {start + error.start}"
    return Fault(f"is not UTF-8: {place}", advice="convert it to UTF-8")


def check_utf8(text: bytes, start: int = 0) -> None:
    """Raise Fault for bytes, found at offset `start` of a file, that are not UTF-8.

    Decodes a part at a time: all of a long text would take up to four times its bytes.
    """
    first = 0
    while first < len(text):
        last = character_start(text, first + PROBE)
        try:
            text[first:last].decode()
        except UnicodeDecodeError as error:
            raise no_utf8(error, start + first) from None
        first = last


def character_start(text: bytes, place: int) -> int:
    """The last beginning of a character at or before a place in a text of UTF-8, or its end.

    Where there is none within three bytes, the text is not UTF-8, and the place itself is returned.
    """
    if place >= len(text):
        return len(text)
    found = next((at for at in range(place, place - 4, -1) if text[at] & 0xC0 != 0x80), place)
    return found if found > 0 else place


def file_text(content: bytes) -> str:
    """All of a small text file, without its byte order mark. Raises Fault."""
    content = without_mark(content)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise no_utf8(error) from None
