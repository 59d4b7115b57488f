"""Documents of every source through the Hugging Face `datasets` library, and arrow files of tokens.

The only module of the data layer that imports `datasets`, which takes a second: import it where it
is used.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data.faults import fault_in, no_utf8
from app.data.hub import Loaded, check_folder, explained, silence
from app.data.paths import source_option
from app.data.sources import Sources
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError, nearest


def write_tokens(
    config: DataConfig, tokenizer: Tokenizer, sources: Sources, folder: Path
) -> list[str]:
    """Write all non-empty documents of a source, in a fixed order, as arrow files in `folder`.

    Each document ends with eod. Returns the names of the files. Raises ConfigError when the source
    cannot be read or holds no text.
    """
    silence()
    reader = _Reader(config, [file.path for file in sources.files], str(folder / "raw"))
    raw = reader.read()
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    tokens = reader.explained(
        lambda: raw.with_format("arrow").map(
            _encode_batch,
            batched=True,
            remove_columns=raw.column_names,
            num_proc=config.num_proc if config.num_proc > 1 else None,
            fn_kwargs={"tokenizer": tokenizer, "dtype": np.dtype(dtype).name},
            features=datasets.Features(
                {"ids": datasets.List(datasets.Value(np.dtype(dtype).name))}
            ),
            cache_file_name=str(folder / "tokens.arrow"),
        )
    )
    if not len(tokens):
        raise ConfigError(*source_option(config), f"no text in any of its {len(raw)} documents")
    return [os.path.basename(file["filename"]) for file in tokens.cache_files]


def default_cache() -> Path:
    """The library's own cache folder."""
    return Path(datasets.config.HF_DATASETS_CACHE)


def streamed(config: DataConfig) -> datasets.IterableDataset:
    """The documents of a `data.streaming` source, read as they are asked for; its only column
    holds the text.
    """
    silence()
    return _only_text(_from_hub(config, config.cache_dir), config)


def first_texts(stream: datasets.IterableDataset, config: DataConfig) -> list[str | None]:
    """The documents of a stream that are kept for validation. Raises ConfigError."""
    rows = stream.take(config.validation_documents)
    return explained(config, lambda: [text for row in rows for text in row.values()])


def _encode_batch(batch: pa.Table, tokenizer: Tokenizer, dtype: str) -> pa.Table:
    """Lists of ids, each followed by eod, for a batch of texts; none for empty documents."""
    texts = [text or "" for text in batch.column(0).to_pylist()]
    documents = [np.asarray(ids, dtype=dtype) for ids in tokenizer.encode_batch(texts) if len(ids)]
    offsets = np.cumsum([0, *(len(ids) + 1 for ids in documents)])
    flat = np.full(offsets[-1], tokenizer.eod, dtype=dtype)
    for ids, start in zip(documents, offsets, strict=False):
        flat[start : start + len(ids)] = ids
    return pa.table(
        {"ids": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))}
    )


class _Reader:
    """Reads a source as a dataset with one column; `cache`: where the library writes meanwhile."""

    def __init__(self, config: DataConfig, files: Sequence[str], cache: str) -> None:
        self.config = config
        self.files = tuple(files)
        self.cache = cache

    def read(self) -> datasets.Dataset:
        """All documents. Raises ConfigError."""
        match self.config.source:
            case Source.stdlib | Source.text:
                return self.explained(self._one_per_file)
            case Source.jsonl:
                return self.explained(lambda: _only_text(self._from_json(), self.config))
            case Source.parquet:
                return self.explained(lambda: _only_text(self._from_parquet(), self.config))
            case Source.hub:
                return self.explained(lambda: _only_text(self._from_hub(), self.config))

    def _from_hub(self) -> datasets.Dataset | datasets.IterableDataset:
        # Files of a folder are read anew; what the hub sent is kept by the library, by its commit.
        return _from_hub(self.config, self.cache if self.files else self.config.cache_dir)

    def explained(self, load: Callable[[], Loaded]) -> Loaded:
        """`load()`, with the file and the place named where one of the files is at fault."""
        try:
            return explained(self.config, load)
        except ConfigError as error:
            if error.__cause__ is None:  # was found by us
                raise
            for file in self.files:
                if fault := fault_in(file, self.config):
                    raise ConfigError(source_option(self.config)[0], file, fault) from error
            raise

    def _one_per_file(self) -> datasets.Dataset:
        # Python's own tests have files that are not UTF-8 on purpose.
        strict = self.config.source is Source.text
        return datasets.Dataset.from_generator(
            _read_files,
            gen_kwargs={"files": self.files, "strict": strict},
            cache_dir=self.cache,
            features=datasets.Features({"text": datasets.Value("string")}),
        )

    def _from_json(self) -> datasets.Dataset:
        if not any(os.path.getsize(file) for file in self.files):
            raise ConfigError(*source_option(self.config), "no text: every file has 0 bytes")
        files = [glob.escape(file) for file in self.files]
        return datasets.Dataset.from_json(files, cache_dir=self.cache)

    def _from_parquet(self) -> datasets.Dataset:
        columns = parquet.read_schema(self.files[0]).names
        field = self.config.text_field
        if field not in columns:
            raise _no_column(self.config, columns)
        files = [glob.escape(file) for file in self.files]
        return datasets.Dataset.from_parquet(files, cache_dir=self.cache, columns=[field])


def _read_files(files: Sequence[str], strict: bool) -> Iterator[dict[str, str]]:
    for file in files:
        content = Path(file).read_bytes()
        try:
            yield {"text": content.decode("utf-8", errors="strict" if strict else "replace")}
        except UnicodeDecodeError as error:
            raise ConfigError(
                "data.path", file, no_utf8(error), advice="convert it to UTF-8"
            ) from error


def _from_hub(config: DataConfig, cache: str | None) -> datasets.Dataset | datasets.IterableDataset:
    name = str(config.name)
    check_folder(name)
    return explained(
        config,
        lambda: datasets.load_dataset(
            name,
            config.config_name,
            split=config.split,
            streaming=config.streaming,
            cache_dir=cache,
        ),
    )


def _only_text(dataset: Any, config: DataConfig) -> Any:
    """A dataset of either kind with its text column only."""
    columns = dataset.column_names or list(explained(config, lambda: next(iter(dataset), {})))
    if config.text_field not in columns:
        raise _no_column(config, columns)
    feature = (dataset.features or {}).get(config.text_field)
    if feature is not None and getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise ConfigError("data.text_field", config.text_field, f"holds {feature}, not text")
    return dataset.select_columns([config.text_field])


def _no_column(config: DataConfig, columns: Sequence[str]) -> ConfigError:
    rule = f"no such column; there are {', '.join(columns) or 'none'}"
    return ConfigError(
        "data.text_field", config.text_field, rule, guess=nearest(config.text_field, columns)
    )
