"""Documents of every source through the Hugging Face `datasets` library, tokenized once into its arrow cache.

The only module of the data layer that imports `datasets`, which takes a second: import it where it is used.
"""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_bars
from pyarrow import parquet

from app.choices import Source
from app.config import DataConfig
from app.data.packing import Documents
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

STDLIB_SUFFIXES = (".py", ".rst", ".txt")
NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
Loaded = TypeVar("Loaded")


def tokenized(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    """All non-empty documents of a source that is prepared in advance, in a fixed order, each ending with eod.

    The first call writes the arrow cache (text, then tokens), later ones map it into memory; a changed file or
    tokenizer makes a new entry. Raises ConfigError when the source cannot be read or holds no text.
    """
    _silence()
    raw = _raw(config)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32
    tokens = raw.with_format("arrow").map(
        _encode_batch, batched=True, remove_columns=raw.column_names, num_proc=config.num_proc if config.num_proc > 1 else None,
        fn_kwargs={"tokenizer": tokenizer, "dtype": np.dtype(dtype).name},
        features=datasets.Features({"ids": datasets.List(datasets.Value(np.dtype(dtype).name))}),
    )
    if not len(tokens):
        raise ConfigError(*_place(config), f"no text in any of its {len(raw)} documents")
    return Documents.from_arrow(tokens.data.column("ids"))


def streamed(config: DataConfig) -> datasets.IterableDataset:
    """The documents of a `data.streaming` source, read as they are asked for; its only column holds the text."""
    _silence()
    return _only_text(_from_hub(config), config)


def _encode_batch(batch: pa.Table, tokenizer: Tokenizer, dtype: str) -> pa.Table:
    """Lists of ids, each followed by eod, for a batch of texts; documents without tokens are left out."""
    texts = [text or "" for text in batch.column(0).to_pylist()]
    documents = [np.asarray(ids, dtype=dtype) for ids in tokenizer.encode_batch(texts) if len(ids)]
    offsets = np.cumsum([0, *(len(ids) + 1 for ids in documents)])
    flat = np.full(offsets[-1], tokenizer.eod, dtype=dtype)
    for ids, start in zip(documents, offsets, strict=False):
        flat[start:start + len(ids)] = ids
    return pa.table({"ids": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat))})


def _raw(config: DataConfig) -> datasets.Dataset:
    """The documents of a source as a dataset with one column."""
    match config.source:
        case Source.stdlib:
            return _one_per_file(stdlib_files(), config)
        case Source.text:
            return _one_per_file(matching_files(config.path), config)
        case Source.jsonl:
            files = [glob.escape(file) for file in matching_files(config.path)]
            return _only_text(_explained(config, lambda: datasets.Dataset.from_json(files, cache_dir=config.cache_dir)), config)
        case Source.parquet:
            return _only_text(_explained(config, lambda: _from_parquet(config)), config)
        case Source.hub:
            return _only_text(_from_hub(config), config)


def stdlib_files() -> list[str]:
    """Paths of the Python and text files of the running interpreter's standard library, sorted."""
    found = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in NOT_STDLIB]
        found += [os.path.join(folder, name) for name in names if name.endswith(STDLIB_SUFFIXES)]
    if not found:
        raise ConfigError("data.source", Source.stdlib, "this interpreter's standard library is not a folder of files", "text")
    return sorted(found)


def matching_files(patterns: Sequence[str]) -> list[str]:
    """Absolute paths of the files that match the patterns (`**` matches any folders), sorted, each once.

    Raises ConfigError for a pattern that matches nothing.
    """
    found = set()
    for pattern in patterns:
        files = [os.path.abspath(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        if not files:
            raise ConfigError("data.path", pattern, "matches no file", _nearest_file(pattern))
        found.update(files)
    return sorted(found)


def _nearest_file(pattern: str) -> str | None:
    """The file whose name is most like the pattern's last part, in the nearest folder that exists."""
    folder = next(folder for folder in Path(pattern).parents if folder.is_dir())
    return _most_like(Path(pattern).name, [path for path in folder.iterdir() if path.is_file()])


def _most_like(name: str, paths: list[Path]) -> str | None:
    close = difflib.get_close_matches(name, sorted(path.name for path in paths), n=1, cutoff=0)
    return str(paths[0].parent / close[0]) if close else None


def _one_per_file(files: list[str], config: DataConfig) -> datasets.Dataset:
    stamps = [(file, os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files]
    return datasets.Dataset.from_generator(
        _read_files, gen_kwargs={"files": tuple(files)}, cache_dir=config.cache_dir,
        features=datasets.Features({"text": datasets.Value("string")}),
        fingerprint=hashlib.sha256(repr(stamps).encode()).hexdigest()[:16],  # a changed file is another dataset
    )


def _read_files(files: Sequence[str]) -> Iterator[dict[str, str]]:
    for file in files:
        yield {"text": Path(file).read_bytes().decode("utf-8", errors="replace")}


def _from_parquet(config: DataConfig) -> datasets.Dataset:
    files = matching_files(config.path)
    columns = parquet.read_schema(files[0]).names
    if config.text_field not in columns:
        raise _no_column(config, columns)
    escaped = [glob.escape(file) for file in files]
    return datasets.Dataset.from_parquet(escaped, cache_dir=config.cache_dir, columns=[config.text_field])


def _from_hub(config: DataConfig) -> datasets.Dataset | datasets.IterableDataset:
    name = str(config.name)
    if name.startswith(("/", ".")) and not os.path.isdir(name):
        folders = [path for path in Path(name).parent.glob("*") if path.is_dir()]
        raise ConfigError("data.name", name, "no such folder", _most_like(Path(name).name, folders))
    return _explained(config, lambda: datasets.load_dataset(
        name, config.config_name, split=config.split, streaming=config.streaming, cache_dir=config.cache_dir))


def _only_text(dataset: Any, config: DataConfig) -> Any:
    """A dataset of either kind with its text column only."""
    columns = dataset.column_names or list(_explained(config, lambda: next(iter(dataset), {})))
    if config.text_field not in columns:
        raise _no_column(config, columns)
    feature = (dataset.features or {}).get(config.text_field)
    if feature is not None and getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise ConfigError("data.text_field", config.text_field, f"holds {feature}, not text")
    return dataset.select_columns([config.text_field])


def _no_column(config: DataConfig, columns: Sequence[str]) -> ConfigError:
    close = difflib.get_close_matches(config.text_field, columns, n=1, cutoff=0)
    return ConfigError("data.text_field", config.text_field, f"no such column; there are {', '.join(columns) or 'none'}", *close)


def _explained(config: DataConfig, load: Callable[[], Loaded]) -> Loaded:
    """`load()`, with whatever the library raises told as a ConfigError about the place that it reads."""
    try:
        return load()
    except ConfigError:
        raise
    except Exception as error:  # network, file format, unknown split or configuration: the library has a type for each
        reason = error.__cause__ or error
        raise ConfigError(*_place(config), f"cannot be loaded: {type(reason).__name__}: {reason}") from error


def _place(config: DataConfig) -> tuple[str, str]:
    """Key and value of the option that says where the documents are."""
    match config.source:
        case Source.stdlib:
            return "data.source", config.source.value
        case Source.hub:
            return "data.name", f"{config.name} (config_name={config.config_name}, split={config.split})"
        case _:
            return "data.path", " ".join(config.path)


def _silence() -> None:
    """No progress bars, which every rank would draw, and no log lines: what goes wrong is raised."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    disable_hub_bars()
