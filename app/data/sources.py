"""What a corpus is made of: its files with their sizes and sums, so that changed data are noticed.

Sums are cheap for large files: one of up to 16 MiB is summed whole, a larger one by its size and
64 blocks of 64 KiB, evenly spaced from its first byte to its last. A change of the same length
between two blocks of a large file is thus seen by the file's time only, which is part of the key of
the prepared corpus, but not of what checkpoints record: copies have other times.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from app.choices import BadFile, Source
from app.config import DataConfig
from app.data.paths import index_of, local_files, source_option, stdlib_files
from app.data.tokenizer_files import tokenizer_file
from app.errors import ConfigError, typed

TOKENIZER_KEY = "data.tokenizer"
VALIDATION = "validation/"  # before labels of validation documents of their own
SUMMED_WHOLE = 16 * 2**20  # bytes; of larger files, blocks


BLOCKS = 64  # how many


BLOCK = 64 * 2**10  # and their bytes


READERS = 8  # files that are read at once: file systems over a network need several


LISTED = 10_000  # most files that a checkpoint lists by name


Record = dict[str, Any]  # what a checkpoint keeps of its data


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was found."""

    path: str
    name: str  # below the folder that holds all of the corpus
    bytes: int
    sum: str  # of its contents
    mtime_ns: int
    marked: bool = False  # begins with the byte order mark of UTF-8


@dataclass(frozen=True, slots=True)
class Sources:
    """What the documents and their tokens come from."""

    files: tuple[SourceFile, ...]  # in the order in which they are read
    revision: str | None  # commit of a dataset of the hub, whose files are not looked at
    tokenizer: str | None  # sum of its file; None: bytes
    # Whether texts may once have been read otherwise: times in JSON, marks of the byte order.
    exact: bool = False
    # Of files that cannot be opened: path and reason, where data.on_bad_file leaves them out.
    unreadable: tuple[tuple[str, str], ...] = ()
    template: str | None = None  # sum of the chat template; None: these are no conversations

    def record(self) -> Record:
        """The part that says which data these are, wherever they lie; plain values, for JSON."""
        listed = [[file.name, file.bytes, file.sum] for file in self.files]
        # Only where it says something: records of all other data stay as they were.
        exact = {"exact": True} if self.exact else {}
        texts: list[Any] = [(file.bytes, file.sum) for file in self.files]
        if self.template is not None:
            texts.append(self.template)
        return {
            **exact,
            "count": len(listed),
            "bytes": sum(file.bytes for file in self.files),
            "sum": text_sum(repr(texts)),
            "revision": self.revision,
            "tokenizer": self.tokenizer,
            "files": listed if len(listed) <= LISTED else None,
        }

    def times(self) -> list[int]:
        """When each file was last written, ns since 1970."""
        return [file.mtime_ns for file in self.files]


def find_sources(config: DataConfig) -> Sources:
    """Look at every file of a corpus and at the tokenizer's.

    Raises ConfigError for a pattern that matches nothing, and for a file that cannot be read.
    """
    paths, revision = source_files(config)
    tokenizer = None
    if config.tokenizer != "bytes":
        tokenizer = _look_at(TOKENIZER_KEY, str(tokenizer_file(config.tokenizer)), "").sum
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    key = source_option(config)[0]
    unreadable: list[tuple[str, str]] = []

    def look(path: str) -> SourceFile | None:
        try:
            return _look_at(key, path, folder)
        except ConfigError as error:
            if config.on_bad_file is not BadFile.skip:
                raise
            unreadable.append((path, error.rule))
            return None

    with ThreadPoolExecutor(READERS) as readers:
        files = tuple(file for file in readers.map(look, paths) if file is not None)
    exact = _read_exactly(config, files)
    left = tuple(sorted(unreadable))
    template = None
    if config.source is Source.chat:
        from app.data.chat import chat_template  # imports jinja2

        used = chat_template(config)
        template = text_sum(repr((used.source, sorted(used.tokens.items()))))
    return Sources(files, revision, tokenizer, exact=exact, unreadable=left, template=template)


def _read_exactly(config: DataConfig, files: Sequence[SourceFile]) -> bool:
    """Whether there may be texts that earlier versions did not read as they are written."""
    match config.source:
        case Source.text:
            return any(file.marked for file in files)
        case Source.hub:
            from app.data.hub import is_json  # imports `datasets`

            return is_json(config)
        case _:
            return config.source is Source.jsonl


def source_files(config: DataConfig) -> tuple[list[str], str | None]:
    """Paths of the files in the order in which they are read, and the commit of a hub's dataset."""
    if config.of_hub:
        from app.data.hub import hub_files  # imports `datasets`

        return hub_files(config)
    match config.source:
        case Source.stdlib:
            return stdlib_files(), None
        case Source.megatron:
            pairs = [(path, index_of(path)) for path in local_files(config)]
            return [path for pair in pairs for path in pair if os.path.exists(path)], None
        case _:
            return local_files(config), None


def same_documents(was: Record, now: Record) -> bool:
    """Whether two records are of the same documents, as far as they have sources in common."""
    return all(
        (one["revision"], one["sum"]) == (other["revision"], other["sum"])
        for _, one, other in _in_common(was, now)
    )


def _in_common(was: Record, now: Record) -> Iterator[tuple[str, Record, Record]]:
    """Yield label and both records of every source of training data that two corpora share; the
    whole records if either is of one source.
    """
    if "parts" not in was or "parts" not in now:
        yield "", was, now
        return
    for label, record in was["parts"].items():
        if label in now["parts"] and not label.startswith(VALIDATION):
            yield label, record, now["parts"][label]


def same_tokenizer(was: Record, now: Record) -> bool:
    """Whether two records are of the same tokenizer."""
    return bool(was["tokenizer"] == now["tokenizer"])


def differing_option(config: DataConfig, was: Record, now: Record) -> tuple[str, str]:
    """Return key and value of the option for what differs: the documents, or else the tokenizer."""
    if same_documents(was, now):
        return TOKENIZER_KEY, config.tokenizer
    if config.sources:
        return "data.sources", typed([each.label for each in config.sources])
    return source_option(config)


def identity(record: Record) -> tuple[Any, ...]:
    """What two corpora must have in common; short, however many files there are."""
    return tuple(record[key] for key in ("revision", "sum", "tokenizer"))


def read_otherwise(was: Record, now: Record) -> bool:
    """Whether the program that recorded `was` may have read other texts in the same data: it
    rewrote texts of JSON that look like times, and kept byte order marks.
    """
    return bool(now.get("exact")) and not was.get("exact")


def difference(was: Record, now: Record) -> str | None:
    """How one corpus differs from another in what they share, as text; None: not at all."""
    told = []
    for label, one, other in _in_common(was, now):
        lead = f"{label}: " if label else ""
        if one["revision"] != other["revision"]:
            told.append(f"{lead}revision {other['revision']}, was {one['revision']}")
        if one["sum"] != other["sum"]:
            told.append(lead + _other_files(one, other))
    if was["tokenizer"] != now["tokenizer"]:
        told.append("the tokenizer has other contents")
    return "; ".join(told) or None


def _other_files(was: Record, now: Record) -> str:
    """The first file that differs, and how many more do."""
    if was["files"] is None or now["files"] is None:
        before = f"{was['count']} files of {was['bytes']} bytes"
        return f"{now['count']} files of {now['bytes']} bytes with other contents, were {before}"
    had, has = ({name: facts for name, *facts in each["files"]} for each in (was, now))
    found = (_other_file(name, had.get(name), has.get(name)) for name in had | has)
    told = [text for text in found if text]
    if not told:
        return "the files come in another order"
    return told[0] + (f"; and {len(told) - 1} more files" if len(told) > 1 else "")


def _other_file(name: str, was: list[Any] | None, now: list[Any] | None) -> str | None:
    if was == now:
        return None
    if was is None or now is None:
        return f"{name} is {'gone' if now is None else 'new'}"
    if was[0] != now[0]:
        return f"{name} has {now[0]} bytes, had {was[0]}"
    return f"{name} has other contents"


def check_unchanged(config: DataConfig, sources: Sources) -> None:
    """Raise ConfigError for a file that is no longer as it was found."""
    for file in sources.files:
        try:
            facts = os.stat(file.path)
        except OSError as error:
            raise unreadable(source_option(config)[0], file.path, error) from error
        if (facts.st_size, facts.st_mtime_ns) != (file.bytes, file.mtime_ns):
            raise ConfigError(source_option(config)[0], file.path, "was changed while it was read")


def _look_at(key: str, path: str, folder: str) -> SourceFile:
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            name = path.removeprefix(folder).lstrip(os.sep)
            content = _content_sum(file.fileno(), facts.st_size)
            marked = os.pread(file.fileno(), 3, 0) == codecs.BOM_UTF8
            return SourceFile(
                path,
                name,
                facts.st_size,
                sum=content,
                mtime_ns=facts.st_mtime_ns,
                marked=marked,
            )
    except OSError as error:
        raise unreadable(key, path, error) from error


def unreadable(key: str, path: str, error: OSError) -> ConfigError:
    """What to say of a file that the system does not give."""
    if isinstance(error, FileNotFoundError):
        return ConfigError(key, path, "is no longer there, although it has just been listed")
    return ConfigError(key, path, f"cannot be read: {error.strerror or error}")


def file_sum(path: Path) -> str:
    """Sum of a file's contents, by blocks where it is large. Raises OSError."""
    with path.open("rb") as file:
        return _content_sum(file.fileno(), os.fstat(file.fileno()).st_size)


def _content_sum(handle: int, size: int) -> str:
    summed = xxhash.xxh3_128()
    if size <= SUMMED_WHOLE:
        starts: Sequence[int] = range(0, size, BLOCK)
    else:
        starts = [number * (size - BLOCK) // (BLOCKS - 1) for number in range(BLOCKS)]
    for start in starts:
        summed.update(os.pread(handle, BLOCK, start))
    return summed.hexdigest()


def text_sum(text: str) -> str:
    """Sum of a text, as `file_sum` makes it of a file."""
    return xxhash.xxh3_128(text.encode()).hexdigest()
