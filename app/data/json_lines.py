"""Texts of files with a JSON object per line, exactly as they are written there.

Nothing but the text is looked at: other keys may have any values, of other kinds in every line. A
line of many MiB is parsed without its long strings, of which only the text is then read, a part at
a time: Python's parser would hold it several times.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any
from uuid import uuid4

from app.data.faults import Fault, Reading, character_start, file_format, no_utf8, without_mark

MOST_LINE = 2**30  # bytes of a line
MOST_ARRAY = 2**28  # bytes of a file that is one JSON array, which is read as a whole
LARGE = 2**25  # bytes of a line from which its long strings are taken out before it is parsed
LONG = 2**16  # bytes of such strings
PART = 2**22  # bytes of a long text that are decoded at once
BUFFER = 2**20  # bytes read at once

ESCAPES = 12  # bytes of the longest character that is written with backslashes: `\ud83d\ude00`
LOW_HALF = re.compile(rb"\\u[dD][c-fC-F]")
SPACE = re.compile(r"[ \t\r\n]*")
DEEP = "has more brackets within brackets than can be read"
KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list"}


@contextmanager
def opened(path: str, reading: Reading) -> Iterator[IO[bytes]]:
    """A file of lines, unpacked if it is compressed. Raises Fault for other formats, OSError."""
    with io.BufferedReader(io.FileIO(path), BUFFER) as file:
        reading.tell = file.tell
        with _unpacked(file) as unpacked:
            yield unpacked


def _unpacked(file: io.BufferedReader[Any]) -> IO[bytes]:
    match found := file_format(file.peek(8)[:8]):
        case None:
            return file
        case "gzip":
            return io.BufferedReader(gzip.open(file), BUFFER)
        case "bz2":
            return bz2.open(file)
        case "xz":
            return lzma.open(file)
        case "zstd" | "lz4":
            import pyarrow as pa

            unpacked = pa.input_stream(file, compression=found, buffer_size=BUFFER)
            return io.BufferedReader(unpacked, BUFFER)
        case "parquet":
            raise Fault("is a parquet file", advice="read it with data.source=parquet")
        case _:
            raise Fault(f"is a {found} file, not JSON lines", advice="unpack or convert it")


def json_texts(
    path: str,
    field: str,
    reading: Reading,
    open_file: Callable[[str, Reading], AbstractContextManager[IO[bytes]]] = opened,
) -> Iterator[str | bytes | None]:
    """The text of every line but blank ones; None where it is null or missing. Those of very long
    lines come as UTF-8.

    Adds the keys of the first object to `reading.keys`, and `field` once an object has it.
    Compressed files are unpacked, and a file that is one array gives the texts of its objects.
    Raises Fault, with the line, and OSError.
    """
    with open_file(path, reading) as file:
        offset = 0
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), start=1):
            if number == 1:
                offset, line = len(line), without_mark(line)
                offset -= len(line)
                if line.lstrip().startswith(b"["):
                    yield from _array_texts(line + file.read(MOST_ARRAY), field, reading)
                    return
            if line.isspace() or not line:
                offset += len(line)
                continue
            size = len(line)
            text, fault = None, None
            try:
                text = _line_text(line, field, reading.keys)
            except UnicodeDecodeError as error:
                fault = Fault(f"line {number} {no_utf8(error, offset).rule}")
            except Fault as found:
                fault = Fault(f"line {number} {found.rule}", found.advice)
            del line  # it may be longer than all that follows from it
            if fault is not None:
                reading.bad_row(path, fault)
            else:
                yield text
            offset += size


def json_rows(
    path: str,
    reading: Reading,
    open_file: Callable[[str, Reading], AbstractContextManager[IO[bytes]]] = opened,
) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of every object of JSON lines, which are not parsed, or of one
    array, as `json_texts` reads them. Raises Fault and OSError.
    """
    with open_file(path, reading) as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), start=1):
            if number == 1:
                line = without_mark(line)
                if line.lstrip().startswith(b"["):
                    text = _array(line + file.read(MOST_ARRAY))
                    for row, (at, end, _) in enumerate(_elements(text), start=1):
                        yield f"row {row}", text[at:end]
                    return
            if not line.strip():
                continue
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                reading.bad_row(path, Fault(f"line {number} is not UTF-8: {error.reason}"))
            else:
                yield f"line {number}", text


def _line_text(line: bytes, field: str, keys: set[str]) -> str | bytes | None:
    """The text of a line. Raises Fault and UnicodeDecodeError."""
    if len(line) == MOST_LINE and not line.endswith(b"\n"):
        raise Fault(f"is longer than {MOST_LINE >> 30} GiB")
    if len(line) > LARGE:
        return _large_line_text(line, field, keys)
    text = line.decode().rstrip()
    if line.count(json.dumps(field, ensure_ascii=False).encode()) > 1:
        _check_once(text, field)
    return _checked(parsed(text), field, keys)


def parsed(text: str) -> Any:
    """A value of JSON. Raises Fault."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Fault(f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise Fault(DEEP) from None
    except ValueError:  # a number of thousands of digits, which Python refuses as an integer
        return json.loads(text, parse_int=float)


def _check_once(text: str, field: str) -> None:
    """Raise Fault for an object with several texts."""

    def times(pairs: list[tuple[str, Any]]) -> int:
        return sum(key == field for key, _ in pairs)

    try:
        found = json.loads(text, object_pairs_hook=times, parse_int=float)
    except (ValueError, RecursionError):
        return  # `parsed` says what is wrong
    if text.startswith("{") and found > 1:
        raise Fault(f"has the key {field} {found} times")


def _checked(row: Any, field: str, keys: set[str]) -> str | None:
    """The text of a parsed line. Raises Fault for what is not text."""
    if not isinstance(row, dict):
        raise Fault("is not an object")
    if not keys:
        keys.update(row)
    elif field in row:
        keys.add(field)
    text = row.get(field)
    if text is None:
        return None
    if not isinstance(text, str):
        raise Fault(f"holds {KINDS.get(type(text), 'an object')} in {field}, not text")
    if not text.isascii():
        _check_characters(text, field)
    return text


def _check_characters(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise Fault(f"holds half of a character in {field}: {half}") from None


def _array_texts(content: bytes, field: str, reading: Reading) -> Iterator[str | None]:
    """The texts of the objects of one array. Any fault ends it: what is behind it is unknown."""
    text = _array(content)
    del content
    for at, _, row in _elements(text):
        try:
            found = _checked(row, field, reading.keys)
        except Fault as fault:
            raise _at_line(text, at, fault) from None
        yield found


def _array(content: bytes) -> str:
    """The text of one array. Raises Fault."""
    if len(content) >= MOST_ARRAY:
        rule = f"is one JSON array of more than {MOST_ARRAY >> 20} MiB"
        raise Fault(rule, advice="write an object per line")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise no_utf8(error) from None


def _elements(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield where each element of an array begins and ends, and the element. Raises Fault."""
    at = _next(text, text.index("[") + 1)
    first = True
    while not text.startswith("]", at):
        try:
            begin, end, row = _element(text, at, first)
        except Fault as fault:
            raise _at_line(text, at, fault) from None
        yield begin, end, row
        at, first = _next(text, end), False
    if _next(text, at + 1) < len(text):
        raise Fault("holds more than one JSON array")


def _at_line(text: str, at: int, fault: Fault) -> Fault:
    number = text.count("\n", 0, at) + 1
    return Fault(f"line {number} {fault.rule}", fault.advice)


def _next(text: str, at: int) -> int:
    """The next place that is no white space."""
    return SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing too


def _element(text: str, at: int, first: bool) -> tuple[int, int, Any]:
    """Where an element of an array begins, behind its comma, and ends, and the element. Raises
    Fault.
    """
    if not first:
        if not text.startswith(",", at):
            raise Fault("is not JSON: Expecting ',' or ']' behind an object")
        at = _next(text, at + 1)
    try:
        row, end = json.JSONDecoder(parse_int=float).raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Fault(f"is not JSON: {error.msg}, at line {error.lineno}") from None
    except RecursionError:
        raise Fault(DEEP) from None
    return at, end, row


def _large_line_text(line: bytes, field: str, keys: set[str]) -> str | bytes | None:
    """The text of a line that is parsed without its long strings."""
    places: dict[str, tuple[int, int]] = {}  # of those strings, by what stands for them
    name = uuid4().hex
    outline: list[bytes] = []
    done = 0
    at = line.find(b'"') + 1
    while at:
        end = _string_end(line, at)
        if end - at > LONG:
            known = f"{name}{len(places)}"
            places[known] = at, end
            outline += [line[done:at], known.encode()]
            done = end
        at = line.find(b'"', end + 1) + 1
    outline.append(line[done:])
    short = b"".join(outline)
    del outline
    try:
        text = short.decode().rstrip()
    except UnicodeDecodeError:
        line.decode()  # for the place in the line
        raise
    _check_once(text, field)
    value = _checked(parsed(text), field, keys)
    return value if value not in places else _unescaped(line, *places[value], field=field)


def _string_end(line: bytes, start: int) -> int:
    """Where the quotation mark is that ends a string which begins at `start`, or the end."""
    end = line.find(b'"', start)
    while end > start and line[end - 1] == 0x5C and _backslashes(line, start, end) % 2:
        end = line.find(b'"', end + 1)
    return end if end >= 0 else len(line)


def _backslashes(line: bytes, start: int, end: int) -> int:
    """How many stand before a place in a string."""
    at = end
    while at > start and line[at - 1] == 0x5C:
        at -= 1
    return end - at


def _whole_characters(line: bytes, start: int, end: int) -> int:
    """The last place at or before `end` where a string that begins at `start` can be cut."""
    last = line.rfind(b"\\", max(start, end - ESCAPES), end) + 1
    if not last:
        return character_start(line, end)
    cut = last - _backslashes(line, start, last) % 2
    if cut - start > ESCAPES and LOW_HALF.match(line, cut):
        return _whole_characters(line, start, cut)  # the other half may stand before it
    return cut


def _unescaped(line: bytes, start: int, stop: int, *, field: str) -> bytes:
    """A string of JSON as UTF-8, read a part at a time."""
    text = bytearray()
    while start < stop:
        end = _whole_characters(line, start, start + PART) if start + PART < stop else stop
        try:
            value = parsed(f'"{line[start:end].decode()}"')
        except UnicodeDecodeError as error:
            place = start + error.start, start + error.end
            raise UnicodeDecodeError("utf-8", line, *place, error.reason) from None
        except Fault:
            raise Fault(f"is not JSON: its text cannot be read from byte {start} on") from None
        _check_characters(value, field)
        text += value.encode()
        start = end
    return bytes(text)
