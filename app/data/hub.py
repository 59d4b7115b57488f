"""Datasets of the Hugging Face hub and of local folders, and what is said of their faults.

Imports `datasets`, which takes a second, as no other module of the data layer does at its top:
import it where it is used. Files of JSON are not left to the library, which gives a type to
each key of each file, and rewrites texts that look like times.
"""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import datasets
import pyarrow as pa
from datasets.builder import Key
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.utils.file_utils import xopen
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_bars
from pyarrow.parquet import read_schema

from app.choices import Source
from app.config import DataConfig
from app.data.documents import bounded, documents, rows_at_once, text_fault, texts_of
from app.data.faults import Fault, Reading, in_one_line
from app.data.json_lines import BUFFER, json_rows, json_texts
from app.data.offline import go_offline_without_network
from app.data.paths import most_like, no_column, source_option
from app.errors import ConfigError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})  # what a disk says
TABLE = 2**22  # characters of texts that the library gets at once
ROW, TEXT = "row", "text"  # columns of conversations: as JSON, and as a template writes them
SHOWN = 60  # characters of a row that a message shows

Loaded = TypeVar("Loaded")


def hub_files(config: DataConfig) -> tuple[list[str], str | None]:
    """Files of the splits of a local folder, in order; for a dataset of the hub, its commit."""
    silence()
    name = str(config.name)
    builder = _builder(config, config.cache_dir)
    if not os.path.isdir(name):
        return [], str(builder.hash)
    splits = builder.config.data_files or {}
    # "train[:10%]+test": train and test.
    wanted = set(re.findall(r"(?:^|\+)\s*(\w+)", config.split))
    read = [paths for split, paths in splits.items() if str(split) in wanted]
    return [str(path) for paths in read for path in paths], None


def is_json(config: DataConfig) -> bool:
    """Whether the files of a dataset are of JSON."""
    silence()
    return isinstance(_builder(config, config.cache_dir), Json)


def default_cache() -> Path:
    """The library's own cache folder."""
    return Path(datasets.config.HF_DATASETS_CACHE)


def hub_documents(
    config: DataConfig, files: Sequence[str], cache: str, reading: Reading
) -> Iterator[bytes]:
    """All documents of a dataset as UTF-8, in order, empty ones too. `files` are those of a local
    folder, `cache` is where the library puts what it makes of them. Raises ConfigError.
    """
    silence()
    # Files of a folder are read anew; what the hub sent is kept by the library, by its commit.
    place = cache if files else config.cache_dir
    try:
        raw = explained(config, lambda: _only_text(_dataset(config, place), config))
    except ConfigError as error:
        if error.__cause__ is not None:  # was not found by us
            for file in files:
                if fault := _fault_of(file, config):
                    raise ConfigError("data.name", file, fault) from error
        raise
    rows = rows_at_once(raw.data.nbytes, len(raw.data))
    tables = raw.with_format("arrow").iter(batch_size=rows)
    name = str(config.name)
    if config.source is Source.chat:
        texts = _conversations(tables, config, reading)
    else:
        found = (text for table in tables for text in _texts_of_table(table, config.text_field))
        texts = _checked(found, name, reading)
    try:
        yield from bounded(texts, name, reading)
    except Fault as fault:
        raise ConfigError(*source_option(config), fault.rule, advice=fault.advice) from fault


def _checked(texts: Iterable[bytes | None], name: str, reading: Reading) -> Iterator[bytes]:
    for row, text in enumerate(texts, start=1):
        if fault := text_fault(text, row):
            reading.bad_row(name, fault)
        yield text or b""


def _conversations(
    tables: Iterable[pa.Table], config: DataConfig, reading: Reading
) -> Iterator[bytes]:
    from app.data.chat import Conversations, chat_template  # imports jinja2

    writer = Conversations(chat_template(config))
    for number, row in enumerate((row for table in tables for row in table.to_pylist()), start=1):
        try:
            text = writer.text(row.get(ROW, row))
        except Fault as fault:
            rule = f"row {number} {fault.rule}"
            reading.bad_row(str(config.name), Fault(rule, fault.advice))
        else:
            yield text.encode()


def _texts_of_table(table: pa.Table, field: str) -> Iterator[bytes | None]:
    for chunk in table.column(0).chunks:
        yield from texts_of(chunk, field)


def streamed(config: DataConfig) -> datasets.IterableDataset:
    """The documents of a `data.streaming` source, read as they are asked for; its only column
    holds the text, of conversations with marks.
    """
    silence()
    found = _only_text(_dataset(config, config.cache_dir), config)
    if config.source is not Source.chat:
        return found
    columns = _of_conversations(config, _columns(found, config))
    from app.data.chat import Conversations, chat_template  # imports jinja2

    writer = Conversations(chat_template(config))

    def written(row: dict[str, Any]) -> dict[str, str]:
        given = row.get(ROW, row)
        try:
            return {TEXT: writer.text(given)}
        except Fault as fault:
            begin = given if isinstance(given, str) else repr(given)
            rule = f"a row {fault.rule}; it begins {begin[:SHOWN]!r}"
            raise ConfigError(*source_option(config), rule, advice=fault.advice) from fault

    return found.map(written, remove_columns=columns)


def first_texts(stream: datasets.IterableDataset, config: DataConfig) -> list[str | None]:
    """The documents of a stream that are kept for validation. Raises ConfigError."""
    rows = stream.take(config.validation_documents)
    return explained(config, lambda: [text for row in rows for text in row.values()])


def _builder(config: DataConfig, cache: str | None, **options: object) -> Any:
    name = str(config.name)
    check_folder(name)
    place = {"name": config.config_name, "cache_dir": cache}
    return explained(config, lambda: datasets.load_dataset_builder(name, **place, **options))


def _dataset(config: DataConfig, cache: str | None) -> Any:
    """A dataset of the kind that the configuration asks for, with all columns; of files of JSON
    with the text only.
    """
    builder = _builder(config, cache)
    # With types of its own it has an entry of its own in the library's cache.
    only = datasets.Features({_column(config): datasets.Value("string")})
    if isinstance(builder, Json):
        builder = _builder(config, cache, features=only)
        builder._generate_tables = partial(_exact_tables, config, builder.token)
    elif isinstance(builder, Parquet) and _begins_with_nulls(builder, config):
        builder = _builder(config, cache, features=only, columns=[config.text_field])
    if config.streaming:
        return explained(config, lambda: builder.as_streaming_dataset(split=config.split))

    def prepared() -> datasets.Dataset:
        builder.download_and_prepare()
        return builder.as_dataset(split=config.split)

    return explained(config, prepared)


def _begins_with_nulls(builder: Parquet, config: DataConfig) -> bool:
    """Return whether the first file of a local folder has no text at all: its column is of type
    null, which the library would expect of every file.
    """
    splits = builder.config.data_files or {}
    first = str(next((path for paths in splits.values() for path in paths), ""))
    if not os.path.isfile(first):
        return False
    try:
        schema = read_schema(first)
    except (OSError, pa.ArrowException):
        return False  # the library says what is wrong with it
    field = config.text_field
    return field in schema.names and pa.types.is_null(schema.field(field).type)


def _exact_tables(
    config: DataConfig,
    token: Any,
    files_iterables: Sequence[Iterable[str]],
    original_files: Sequence[str],
    **_others: object,
) -> Iterator[tuple[Key, pa.Table]]:
    """What the library asks of a builder, with the texts as they are written: a row per line."""
    field, chat = _column(config), config.source is Source.chat
    reading = Reading()
    any_text = False

    def opened(path: str, _reading: Reading) -> IO[bytes]:
        options = datasets.DownloadConfig(token=token)
        return io.BufferedReader(xopen(path, "rb", download_config=options), BUFFER)

    for shard, files in enumerate(files_iterables):
        batch = 0
        for file in files:
            rows = (text for _, text in json_rows(file, reading, opened))
            found = rows if chat else json_texts(file, field, reading, opened)
            try:
                for texts in _some(found):
                    any_text = any_text or any(text is not None for text in texts)
                    column = pa.array(texts, pa.string())
                    yield Key(shard, batch), pa.table({field: column})
                    batch += 1
            except Fault as fault:
                named = original_files[shard]
                raise ConfigError("data.name", named, fault.rule, advice=fault.advice) from fault
        if reading.keys and field not in reading.keys and not any_text:
            raise no_column(field, sorted(reading.keys))


def _column(config: DataConfig) -> str:
    """Return the only column that is read of files of JSON."""
    return ROW if config.source is Source.chat else config.text_field


def _some(texts: Iterable[str | bytes | None]) -> Iterator[list[str | None]]:
    """Texts in lists of some MiB."""
    found: list[str | None] = []
    size = 0
    for text in texts:
        found.append(text.decode() if isinstance(text, bytes) else text)
        size += 1 + len(text or "")
        if size >= TABLE:
            yield found
            found, size = [], 0
    yield found


def _only_text(dataset: Any, config: DataConfig) -> Any:
    """A dataset of either kind with its text column only."""
    columns = _columns(dataset, config)
    if config.source is Source.chat:
        return dataset.select_columns(_of_conversations(config, columns))
    if config.text_field not in columns:
        raise no_column(config.text_field, columns)
    feature = (dataset.features or {}).get(config.text_field)
    if feature is not None and getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise ConfigError("data.text_field", config.text_field, f"holds {feature}, not text")
    return dataset.select_columns([config.text_field])


def _columns(dataset: Any, config: DataConfig) -> list[str]:
    return dataset.column_names or list(explained(config, lambda: next(iter(dataset), {})))


def _of_conversations(config: DataConfig, columns: Sequence[str]) -> list[str]:
    """Return the columns that conversations are in. Raises ConfigError."""
    from app.data.messages import COLUMNS, form_of

    if ROW in columns:
        return [ROW]
    try:
        form_of(dict.fromkeys(columns, ""))
    except Fault as fault:
        raise ConfigError(*source_option(config), fault.rule) from fault
    return [name for name in columns if name in COLUMNS]


def _fault_of(path: str, config: DataConfig) -> str | None:
    """Read a file of a local folder until its first fault; None where it has none, or is of a
    format that only the library reads.
    """
    kinds = {".json": Source.jsonl, ".jsonl": Source.jsonl, ".parquet": Source.parquet}
    if (kind := kinds.get(Path(path).suffix)) is None:
        return None
    try:
        if config.source is Source.chat:
            from app.data.chat import conversations  # imports jinja2

            found = conversations(path, config, Reading())
        else:
            alone = replace(config, source=kind, path=(path,), streaming=False)
            found = documents(path, alone, Reading())
        for _ in found:
            pass
    except Fault as fault:
        return fault.rule
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None


def check_folder(name: str) -> None:
    """Raise ConfigError for a name that looks like a folder and is none."""
    if name.startswith(("/", ".")) and not os.path.isdir(name):
        folders = [path for path in Path(name).parent.glob("*") if path.is_dir()]
        raise ConfigError(
            "data.name", name, "no such folder", guess=most_like(Path(name).name, folders)
        )


def explained(config: DataConfig, load: Callable[[], Loaded]) -> Loaded:
    """`load()`; what the library raises becomes a ConfigError about the place that it reads."""
    if config.of_hub and not os.path.isdir(str(config.name)):
        go_offline_without_network()
    try:
        return load()
    except ConfigError:
        raise
    # network, file format, unknown split or configuration: the library has a type for each
    except Exception as error:
        reason = error.__cause__ or error
        if isinstance(reason, ConfigError):  # raised by what the library has called
            raise reason from None
        if isinstance(reason, OSError) and reason.errno in FULL:
            rule = f"cannot be written: {reason.strerror}"
            raise ConfigError(
                "data.cache_dir", config.cache_dir, rule, advice="make room there"
            ) from None
        if isinstance(reason, ConnectionError) and constants.HF_HUB_OFFLINE:
            rule = f"is not in the cache, and {constants.ENDPOINT} cannot be reached"
            raise ConfigError(*source_option(config), rule) from error
        text = in_one_line(f"{type(reason).__name__}: {reason}")
        zstd = "Compression type zstd" in text or "zstandard" in text
        advice = "type pip install zstandard" if zstd else None
        rule = f"cannot be loaded: {text}"
        raise ConfigError(*source_option(config), rule, advice=advice) from error


def silence() -> None:
    """No progress bars, which all ranks would draw, and no log lines: errors are raised."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    disable_hub_bars()
