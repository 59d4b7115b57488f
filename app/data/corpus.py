"""From the documents of a source to an arrow file of tokens.

Documents are read one by one and tokenized in batches of about BATCH_BYTES, longer ones by
themselves, so that memory depends on the longest document and not on the corpus. Every KEPT batches
the state is written beside the tokens (`WriterState`), from which an interrupted start continues.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pyarrow as pa

from app.choices import BadFile, Source
from app.config import DataConfig
from app.data.documents import ColumnFault, documents, readable
from app.data.faults import Fault, Reading
from app.data.paths import no_column, source_option
from app.data.slices import TokenBuffer
from app.data.sources import Sources, unreadable
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError, nearest

BATCH_BYTES = 2**22  # of text that is tokenized at once
LONG = 2**20  # bytes of a document that is a batch by itself
LARGE = 2**24  # bytes of one that is not sent to another process
TOKENS = "tokens.arrow"
KEPT = 16  # batches after which the state is written
STATE = "state.json"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of the arrow streaming format


@dataclass(frozen=True, slots=True)
class Written:
    """The files of tokens, and the source files that were left out, each with its fault."""

    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)  # as `Reading.bad_rows`
    mapped: tuple[str, ...] = ()  # source files whose tokens are read where they are
    open_end: tuple[str, int] | None = None  # first document of these, from 1, without its end


class Place(NamedTuple):
    """How far the documents of a source were read."""

    file: int = 0
    document: int = 0  # documents of that file, empty ones too


START = Place()


@dataclass(slots=True)
class WriterState:
    """State of a corpus that is being written: what TOKENS holds up to `size`."""

    size: int = 0  # bytes of TOKENS
    place: Place = START  # where the next document is
    documents: int = 0
    tokens: int = 0
    bad_rows: dict[str, tuple[int, str]] = field(default_factory=dict)  # of files before the place

    @classmethod
    def of(cls, folder: Path) -> WriterState:
        """Return what a start that was interrupted has left in a folder, or the beginning."""
        try:
            found = cls(**json.loads((folder / STATE).read_text(encoding="utf-8")))
            if (folder / TOKENS).stat().st_size >= found.size:
                found.place = Place(*found.place)
                return found
        except (OSError, ValueError, TypeError):
            pass
        return cls()

    def write(self, file: IO[bytes], folder: Path) -> None:
        """Write the state behind the tokens that it tells of."""
        self.size = file.tell()
        file.flush()
        os.fsync(file.fileno())
        new = folder / f".{STATE}"
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        new.replace(folder / STATE)


class TokenWriter:
    """Writes the tokens of a source into a folder, from where an earlier writer was interrupted."""

    def __init__(
        self, config: DataConfig, tokenizer: Tokenizer, sources: Sources, folder: Path
    ) -> None:
        self.config = config
        self.folder = folder
        self.reader = DocumentReader(config, sources, folder / "raw")
        chat = config.source is Source.chat
        narrow = tokenizer.vocab_size <= 1 << 16 and not chat
        self.dtype = np.dtype(np.uint16 if narrow else np.int32)
        self.encode: Encode = _ChatEncoder(tokenizer) if chat else _Encoder(tokenizer, self.dtype)
        self.kept = WriterState.of(folder)
        self._tokens_before = self.kept.tokens
        self._began = time.monotonic()

    def write(self) -> Written:
        """Write all non-empty documents, in a fixed order, as an arrow file.

        Each document ends with eod. Raises ConfigError when the source cannot be read or holds no
        text, OSError when the file cannot be written.
        """
        kept, reader = self.kept, self.reader
        reader.reading.bad_rows.update(kept.bad_rows)
        with (self.folder / TOKENS).open("r+b" if kept.size else "wb") as file:
            file.truncate(kept.size)
            file.seek(kept.size)
            schema = pa.schema({"ids": pa.list_(pa.from_numpy_dtype(self.dtype))})
            if not kept.size:
                file.write(schema.serialize())
            found = batches(reader.documents(kept.place))
            done: Iterable[tuple[Place, _Tokens]]
            if self.config.num_proc == 1:
                done = ((place, self.encode(batch)) for place, batch in found)
            else:
                done = _tokenized(found, self.encode, self.config.num_proc)
            for number, (kept.place, tokens) in enumerate(done, start=1):
                kept.documents += len(tokens.offsets) - 1
                kept.tokens += len(tokens.ids)
                file.write(pa.record_batch([tokens.array()], schema).serialize())
                if number % KEPT == 0:
                    kept.bad_rows = reader.bad_rows_before(kept.place.file)
                    kept.write(file, self.folder)
            file.write(END_OF_STREAM)
        if not kept.documents:
            raise reader.nothing()
        return Written((TOKENS,), tuple(reader.left_out), reader.reading.bad_rows)

    def progress(self) -> str:
        """How much was written, and how fast."""
        rate = (self.kept.tokens - self._tokens_before) / (time.monotonic() - self._began)
        counts = f"{self.kept.documents:,} documents, {self.kept.tokens:,} tokens ({rate:,.0f}/s)"
        share = self.reader.share()
        return counts if share is None else f"{share:.0%} of the bytes, {counts}"


def batches(found: Iterable[tuple[Place, bytes]]) -> Iterator[tuple[Place, list[bytes]]]:
    """The non-empty documents in batches, each of which its last document fills, and how far the
    source is read with it; a document of LONG bytes and more is a batch by itself.
    """
    batch: list[bytes] = []
    size = 0
    last = START
    for place, document in found:
        if not document:
            continue
        alone = len(document) >= LONG
        if batch and (alone or size >= BATCH_BYTES):
            yield last, batch
            batch, size = [], 0
        last = place
        if alone:
            yield last, [document]
            continue
        batch.append(document)
        size += len(document)
    if batch:
        yield last, batch


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Documents one behind the other, each with its end."""

    offsets: np.ndarray  # of each, and where the last one ends
    ids: np.ndarray

    def array(self) -> pa.ListArray:
        """A list of ids for each, without a copy."""
        return pa.ListArray.from_arrays(pa.array(self.offsets), pa.array(self.ids))


Encode = Callable[[list[bytes]], _Tokens]


@dataclass(frozen=True, slots=True)
class _ChatEncoder:
    """Makes tokens of batches of conversations."""

    tokenizer: Tokenizer

    def __call__(self, batch: list[bytes]) -> _Tokens:
        from app.data.chat import marked_documents

        found = marked_documents(self.tokenizer, batch)
        offsets = np.cumsum([0, *map(len, found)], dtype=np.int32)
        return _Tokens(offsets, np.concatenate(found))


@dataclass(frozen=True, slots=True)
class _Encoder:
    """Makes tokens of one type of batches of documents; those without ids are left out."""

    tokenizer: Tokenizer
    dtype: np.dtype

    def __call__(self, batch: list[bytes]) -> _Tokens:
        if len(batch) == 1 and len(batch[0]) >= LONG:
            return self._long(batch[0])
        found = map(np.asarray, self.tokenizer.encode_documents(batch))
        documents = [ids for ids in found if len(ids)]
        offsets = np.cumsum([0, *(len(ids) + 1 for ids in documents)], dtype=np.int32)
        flat = np.full(offsets[-1], self.tokenizer.eod, dtype=self.dtype)
        for ids, start in zip(documents, offsets, strict=False):
            flat[start : start + len(ids)] = ids
        return _Tokens(offsets, flat)

    def _long(self, document: bytes) -> _Tokens:
        buffer = TokenBuffer(self.dtype)
        self.tokenizer.encode_long(document, buffer)
        if len(buffer):
            buffer.add([self.tokenizer.eod])
        ends = [0, len(buffer)] if len(buffer) else [0]
        return _Tokens(np.array(ends, dtype=np.int32), buffer.ids())


def _tokenized(
    found: Iterator[tuple[Place, list[bytes]]], encode: Encode, processes: int
) -> Iterator[tuple[Place, _Tokens]]:
    """Tokens of every batch, in order, by so many processes beside this one."""
    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    workers = []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        ends.append(ours)
        worker = context.Process(target=_work, args=(theirs, list(ends), encode), daemon=True)
        worker.start()
        theirs.close()
        workers.append(worker)
    free = deque(ends)
    busy: deque[tuple[Place, Connection]] = deque()
    try:
        for place, batch in found:
            large = len(batch[0]) >= LARGE
            # Each has one batch at most, so that no send waits for one that waits for us.
            while busy and (large or not free):
                yield busy[0][0], _received(busy[0][1])
                free.append(busy.popleft()[1])
            if large:
                yield place, encode(batch)
                continue
            free[0].send(batch)
            busy.append((place, free.popleft()))
        for each, end in busy:
            yield each, _received(end)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        rule = "one of these processes has died, perhaps for want of memory"
        raise ConfigError("data.num_proc", processes, rule, advice="start fewer") from None
    finally:
        for end in ends:
            end.close()
        for worker in workers:
            worker.terminate()
            worker.join()


def _received(end: Connection) -> _Tokens:
    found: _Tokens | Exception = end.recv()
    if isinstance(found, Exception):
        raise found
    return found


def _work(connection: Connection, others: list[Connection], encode: Encode) -> None:
    """Tokenize what comes until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    for other in others:  # that a fork has copied: they would keep ends open
        other.close()
    with suppress(EOFError, OSError):
        while True:
            batch = connection.recv()
            try:
                found: object = encode(batch)
            except Exception as error:
                found = error
            connection.send(found)


def _documents(path: str, config: DataConfig, reading: Reading) -> Iterator[bytes]:
    if config.source is Source.chat:
        from app.data.chat import conversations  # imports jinja2

        return readable(conversations(path, config, reading), path, reading)
    return documents(path, config, reading)


class DocumentReader:
    """The documents of a source; counts them, and the files that were left out."""

    def __init__(self, config: DataConfig, sources: Sources, cache: Path) -> None:
        self.config = config
        self.paths = [file.path for file in sources.files]
        self._unreadable = sources.unreadable
        self.cache = cache  # where the datasets library writes meanwhile
        self.count = 0
        self.left_out: list[tuple[str, str]] = []
        self.reading = Reading(config.on_bad_file is BadFile.skip_rows)
        self._sizes = {file.path: file.bytes for file in sources.files}
        self._read = 0  # bytes of the files before the present one

    def documents(self, after: Place = START) -> Iterator[tuple[Place, bytes]]:
        """All documents behind a place, in order, each with the place behind it. Raises
        ConfigError.
        """
        found: Iterable[Iterator[bytes]]
        if self.config.of_hub:
            from app.data.hub import hub_documents  # imports `datasets`

            found = [hub_documents(self.config, self.paths, str(self.cache), reading=self.reading)]
        else:
            paths = self._good_paths()
            self._read = sum(self._sizes[path] for path in paths[: after.file])
            found = map(self._of_file, paths[after.file :])
        for file, texts in enumerate(found, start=after.file):
            for number, document in enumerate(texts, start=1):
                if (place := Place(file, number)) > after:
                    self.count += 1
                    yield place, document

    def share(self) -> float | None:
        """Share of the bytes that was read; None: not known."""
        if self.config.of_hub:
            return None
        try:
            read = self._read + self.reading.tell()
        except ValueError:  # just closed: another thread asks
            return None
        return read / max(1, sum(self._sizes.values()))

    def bad_rows_before(self, file: int) -> dict[str, tuple[int, str]]:
        """Those of the files before this one."""
        before = set(self.paths[:file])
        return {path: each for path, each in self.reading.bad_rows.items() if path in before}

    def nothing(self) -> ConfigError:
        """What to say where no document has a token."""
        field = self.config.text_field
        if (keys := self.reading.keys) and field not in keys:
            return no_column(field, sorted(keys))
        where = source_option(self.config)
        bad = [*self._unreadable, *self.left_out]
        if bad and len(self.left_out) == len(self.paths):
            path, fault = bad[0]
            return ConfigError(*where, f"no file of {len(bad)} can be read: {path}: {fault}")
        if self.config.source is Source.jsonl and not self.count:
            empty = not any(os.path.getsize(path) for path in self.paths)
            rule = f"no text: every file has {'0 bytes' if empty else 'blank lines only'}"
            return ConfigError(*where, rule)
        return ConfigError(*where, f"no text in any of its {self.count} documents")

    def _good_paths(self) -> list[str]:
        """The files to be read: where bad ones are left out, those that are whole."""
        if self.config.on_bad_file is not BadFile.skip:
            return self.paths
        good = []
        for path in self.paths:
            try:
                for _ in _documents(path, self.config, Reading()):
                    pass
            except (Fault, OSError) as error:
                why = error.strerror if isinstance(error, OSError) else str(error)
                self.left_out.append((path, why or str(error)))
            else:
                good.append(path)
        return good

    def _of_file(self, path: str) -> Iterator[bytes]:
        key = source_option(self.config)[0]
        try:
            yield from _documents(path, self.config, self.reading)
            self.reading.tell = int
            self._read += self._sizes[path]
        except ColumnFault as fault:
            if path != self.paths[0]:
                raise ConfigError(key, path, fault.rule, advice=fault.advice) from fault
            field = self.config.text_field
            guess = nearest(field, fault.names)
            raise ConfigError("data.text_field", field, fault.of_all, guess=guess) from fault
        except Fault as fault:
            raise ConfigError(key, path, fault.rule, advice=fault.advice) from fault
        except OSError as error:
            raise unreadable(key, path, error) from error
