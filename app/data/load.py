"""From `DataConfig` to the two splits that a run reads."""

from __future__ import annotations

from itertools import chain

from app.config import DataConfig
from app.data.feed import DataSplit
from app.data.packing import Documents, PackedSequences
from app.data.stream import StreamedSequences
from app.data.tokenizer import Tokenizer

VALIDATION_SEED = 0  # not the run's: losses of runs with different seeds compare


def prepare(config: DataConfig, tokenizer: Tokenizer) -> None:
    """Write the arrow cache, so that `load_data` only maps it.

    Call it on one rank of each host (of one host when the cache folder is shared), then let the ranks meet, then call
    `load_data` on all. Concurrent first calls are safe too, but do the work several times.
    """
    if not config.streaming:
        _prepared(config, tokenizer)


def load_data(config: DataConfig, seq_len: int, seed: int, tokenizer: Tokenizer) -> tuple[DataSplit, DataSplit]:
    """Train and validation data in sequences of `seq_len` tokens; `seed` orders the training data.

    Raises ConfigError when the source cannot be read, holds no text, or either split is shorter than a sequence.
    """
    boundary = tokenizer.eod if config.document_mask else None
    train: PackedSequences | StreamedSequences
    if config.streaming:
        train, held_out = _streamed(config, seq_len, seed, tokenizer)
    else:
        documents, held_out = _prepared(config, tokenizer).split(config.validation_fraction)
        train = PackedSequences(documents.lengths_D, documents.read, seq_len, seed, "training split")
    validation = PackedSequences(held_out.lengths_D, held_out.read, seq_len, VALIDATION_SEED, "validation split")
    return DataSplit(train, boundary), DataSplit(validation, boundary)


def _prepared(config: DataConfig, tokenizer: Tokenizer) -> Documents:
    from app.data.corpus import tokenized  # imports `datasets`

    return tokenized(config, tokenizer)


def _streamed(config: DataConfig, seq_len: int, seed: int, tokenizer: Tokenizer) -> tuple[StreamedSequences, Documents]:
    """A stream without its first documents, and those."""
    from app.data.corpus import streamed  # imports `datasets`

    stream = streamed(config)
    texts = chain.from_iterable(row.values() for row in stream.take(config.validation_documents))
    held_out = Documents.from_lists([[*ids, tokenizer.eod] for text in texts if text and len(ids := tokenizer.encode(text))])
    return StreamedSequences(stream, config.validation_documents, tokenizer, seq_len, seed), held_out
