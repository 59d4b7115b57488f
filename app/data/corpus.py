"""From the documents of a source to an arrow file of tokens.

Documents are read one by one and tokenized in batches of about BATCH_BYTES, longer ones by
themselves, so that memory depends on the longest document and not on the corpus.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa

from app.choices import BadFile, Source
from app.config import DataConfig
from app.data.documents import ColumnFault, documents
from app.data.faults import Fault
from app.data.paths import no_column, source_option
from app.data.slices import TokenBuffer
from app.data.sources import Sources, unreadable
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError, nearest

BATCH_BYTES = 2**22  # of text that is tokenized at once
LONG = 2**20  # bytes of a document that is a batch by itself
LARGE = 2**24  # bytes of one that is not sent to another process
TOKENS = "tokens.arrow"


@dataclass(frozen=True, slots=True)
class Written:
    """The files of tokens, and the source files that were left out, each with its fault."""

    names: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    mapped: tuple[str, ...] = ()  # source files whose tokens are read where they are
    open_end: tuple[str, int] | None = None  # first document of these, from 1, without its end


def write_tokens(
    config: DataConfig, tokenizer: Tokenizer, sources: Sources, folder: Path
) -> Written:
    """Write all non-empty documents of a source, in a fixed order, as an arrow file in `folder`.

    Each document ends with eod. Raises ConfigError when the source cannot be read or holds no text,
    OSError when the file cannot be written.
    """
    reader = DocumentReader(config, sources, folder / "raw")
    found = reader.documents()
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    schema = pa.schema({"ids": pa.list_(pa.from_numpy_dtype(dtype))})
    count = 0
    with (folder / TOKENS).open("wb") as file, pa.ipc.new_stream(file, schema) as sink:
        for tokens in _tokenized(batches(found), _Encoder(tokenizer, dtype), config.num_proc):
            count += len(tokens.offsets) - 1
            sink.write_batch(pa.record_batch([tokens.array()], schema))
    if not count:
        raise reader.nothing()
    return Written((TOKENS,), tuple(reader.left_out))


def batches(found: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The non-empty documents in batches, each of which its last document fills; one of LONG bytes
    and more is a batch by itself.
    """
    batch: list[bytes] = []
    size = 0
    for document in found:
        if not document:
            continue
        alone = len(document) >= LONG
        if batch and (alone or size >= BATCH_BYTES):
            yield batch
            batch, size = [], 0
        if alone:
            yield [document]
            continue
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Documents one behind the other, each with its end."""

    offsets: np.ndarray  # of each, and where the last one ends
    ids: np.ndarray

    def array(self) -> pa.ListArray:
        """A list of ids for each, without a copy."""
        return pa.ListArray.from_arrays(pa.array(self.offsets), pa.array(self.ids))


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


def _tokenized(found: Iterator[list[bytes]], encode: _Encoder, processes: int) -> Iterator[_Tokens]:
    """Tokens of every batch, in order, by so many processes beside this one."""
    if processes == 1:
        yield from map(encode, found)
        return
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
    busy: deque[Connection] = deque()
    try:
        for batch in found:
            large = len(batch[0]) >= LARGE
            # Each has one batch at most, so that no send waits for one that waits for us.
            while busy and (large or not free):
                yield _received(busy[0])
                free.append(busy.popleft())
            if large:
                yield encode(batch)
                continue
            free[0].send(batch)
            busy.append(free.popleft())
        for end in busy:
            yield _received(end)
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


def _work(connection: Connection, others: list[Connection], encode: _Encoder) -> None:
    """Tokenize what comes until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    for other in others:  # that a fork has copied: they would keep ends open
        other.close()
    while True:
        try:
            batch = connection.recv()
        except EOFError:
            return
        try:
            connection.send(encode(batch))
        except Exception as error:
            connection.send(error)


class DocumentReader:
    """The documents of a source; counts them, and the files that were left out."""

    def __init__(self, config: DataConfig, sources: Sources, cache: Path) -> None:
        self.config = config
        self.paths = [file.path for file in sources.files]
        self._unreadable = sources.unreadable
        self.cache = cache  # where the datasets library writes meanwhile
        self.count = 0
        self.left_out: list[tuple[str, str]] = []
        self._keys: set[str] = set()  # of the first object of JSON lines

    def documents(self) -> Iterator[bytes]:
        """All documents, in order. Raises ConfigError."""
        if self.config.source is Source.hub:
            from app.data.hub import hub_documents  # imports `datasets`

            found = hub_documents(self.config, self.paths, str(self.cache))
        else:
            found = (text for path in self._good_paths() for text in self._of_file(path))
        for document in found:
            self.count += 1
            yield document

    def nothing(self) -> ConfigError:
        """What to say where no document has a token."""
        field = self.config.text_field
        if self._keys and field not in self._keys:
            return no_column(field, sorted(self._keys))
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
        if self.config.on_bad_file is BadFile.stop:
            return self.paths
        good = []
        for path in self.paths:
            try:
                for _ in documents(path, self.config, set()):
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
            yield from documents(path, self.config, self._keys)
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
