"""From `DataConfig` to the two splits that a run reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.choices import Packing
from app.config import DataConfig
from app.data.best_fit import BestFitSequences, apart
from app.data.feed import DataSplit
from app.data.packing import Documents, EndsInside, PackedSequences
from app.data.prepared import check_ends, map_tokens, prepare_tokens
from app.data.sources import Sources, find_sources
from app.data.stream import StreamedSequences
from app.data.tokenizer import Tokenizer
from app.errors import Instead

VALIDATION_SEED = 0  # not the run's: losses of runs with different seeds compare


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    sources: Sources | None = None,
    say: Callable[[str], object] = print,
) -> Path | None:
    """Tokenize the corpus into the cache unless it is there; its folder, None for a stream.

    Call it on one rank of each host. `sources` are what the corpus was found to be made of; `say`
    gets a line about a cache that is not whole. Raises ConfigError.
    """
    if config.streaming:
        return None
    return prepare_tokens(config, tokenizer, sources or find_sources(config), say=say)


def load_data(
    config: DataConfig, seq_len: int, seed: int, tokenizer: Tokenizer, prepared: Path | None = None
) -> tuple[DataSplit, DataSplit]:
    """Train and validation data in sequences of `seq_len` tokens; `seed` orders the training data.

    `prepared` is what `prepare` has returned; where it is None, that is called first. Raises
    ConfigError when the source cannot be read, holds no text, or either split is shorter than a
    sequence.
    """
    boundary = tokenizer.eod if config.document_mask else None
    most = config.most_documents(seq_len)
    train: PackedSequences | StreamedSequences
    if config.streaming:
        train, held_out = _streamed(config, seq_len, seed, tokenizer=tokenizer)
    else:
        folder = prepared or prepare(config, tokenizer)
        assert folder
        if boundary is not None:
            check_ends(folder, "data.document_mask=true")
        documents, held_out = map_tokens(folder).split(config.validation_fraction)
        train = _packed(config, documents, seq_len, seed, tokenizer, name="training split")
    share, larger = _validation_share(config)
    validation = _packed(
        config,
        held_out,
        seq_len,
        VALIDATION_SEED,
        tokenizer,
        name="validation split",
        share=share,
        larger=larger,
    )
    return DataSplit(train, boundary, most), DataSplit(validation, boundary, most)


def _packed(
    config: DataConfig,
    documents: Documents,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    **named: Any,
) -> PackedSequences:
    boundary = tokenizer.eod if config.document_mask else None
    most = config.most_documents(seq_len)
    if config.packing is Packing.best_fit:
        assert boundary is not None and most is not None, "DataConfig has refused it"
        whole = apart(documents, boundary)
        return BestFitSequences(
            whole.lengths_D, whole.read, seq_len, seed=seed, max_documents=most, **named
        )
    return PackedSequences(
        documents.lengths_D,
        documents.read,
        seq_len,
        seed=seed,
        max_documents=most,
        inside=_inside(documents, boundary),
        **named,
    )


def _inside(documents: Documents, boundary: int | None) -> EndsInside | None:
    return None if boundary is None else documents.ends_inside(boundary)


def _validation_share(config: DataConfig) -> tuple[str, list[Instead]]:
    """The option that says how large the validation split is, and larger values of it."""
    if config.streaming:
        key, now = "data.validation_documents", str(config.validation_documents)
        more = [str(config.validation_documents * factor) for factor in (2, 10, 100)]
    else:
        key, now = "data.validation_fraction", f"{config.validation_fraction:g}"
        more = [str(value) for value in (0.1, 0.2, 0.3, 0.5) if value > config.validation_fraction]
    return f"{key}={now}", [Instead(f"{key}={value}") for value in more]


def _streamed(
    config: DataConfig, seq_len: int, seed: int, tokenizer: Tokenizer
) -> tuple[StreamedSequences, Documents]:
    """A stream without its first documents, and those."""
    from app.data.hub import first_texts, streamed  # imports `datasets`

    stream = streamed(config)
    texts = first_texts(stream, config)
    held_out = Documents.from_lists(
        [[*ids, tokenizer.eod] for text in texts if text and len(ids := tokenizer.encode(text))]
    )
    return StreamedSequences(
        stream,
        config.validation_documents,
        tokenizer,
        seq_len=seq_len,
        seed=seed,
        max_documents=config.most_documents(seq_len),
    ), held_out
