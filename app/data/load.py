"""From `DataConfig` to the two splits that a run reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.choices import Packing, Source
from app.config import DataConfig
from app.data.best_fit import BestFitSequences, apart
from app.data.feed import DataSplit
from app.data.marks import trained
from app.data.packing import Documents, EndsInside, PackedSequences
from app.data.prepared import check_ends, map_tokens, prepare_tokens
from app.data.sources import Sources, find_sources
from app.data.stream import StreamedSequences
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError, Instead

if TYPE_CHECKING:
    from datasets import IterableDataset

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
    config: DataConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    prepared: Path | None = None,
    of: str = "",
) -> tuple[DataSplit, DataSplit]:
    """Train and validation data of one source in sequences of `seq_len` tokens; `seed` orders the
    training data.

    `prepared` is what `prepare` has returned; where it is None, that is called first. `of` names
    the source in messages. Raises ConfigError when the source cannot be read, holds no text, or
    either split is shorter than a sequence.
    """
    train: PackedSequences | StreamedSequences
    cut = None
    if config.streaming:
        train, held_out = _streamed(config, seq_len, seed, tokenizer=tokenizer)
    else:
        documents, held_out = _mapped(config, tokenizer, prepared).split(config.validation_fraction)
        train = _packed(config, documents, seq_len, seed, tokenizer, name=f"training split{of}")
        cut = _cut(config, documents, seq_len)
    share, larger = _validation_share(config)
    validation = _packed(
        config,
        held_out,
        seq_len,
        VALIDATION_SEED,
        tokenizer,
        name=f"validation split{of}",
        share=share,
        larger=larger,
    )
    return split_of(config, train, tokenizer, cut), split_of(config, validation, tokenizer)


def load_whole(
    config: DataConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    prepared: Path | None = None,
    of: str = "",
) -> DataSplit:
    """All documents of a source, none held out; otherwise as `load_data`."""
    if config.streaming:
        from app.data.hub import streamed  # imports `datasets`

        stream = _stream(streamed(config), config, seq_len, seed, tokenizer, held_out=0)
        return split_of(config, stream, tokenizer)
    documents = _mapped(config, tokenizer, prepared)
    packed = _packed(config, documents, seq_len, seed, tokenizer, name=f"data{of}")
    return split_of(config, packed, tokenizer, _cut(config, documents, seq_len))


def split_of(
    config: DataConfig, sequences: Any, tokenizer: Tokenizer, cut: str | None = None
) -> DataSplit:
    """Sequences with what a batch needs to tell their documents apart; `cut` as there."""
    boundary = tokenizer.eod if config.document_mask else None
    kinds = [each.source for _, each in config.parts] or [config.source]
    most = config.most_documents(sequences.seq_len)
    return DataSplit(sequences, boundary, most, marked=Source.chat in kinds, cut=cut)


def _mapped(config: DataConfig, tokenizer: Tokenizer, prepared: Path | None) -> Documents:
    folder = prepared or prepare(config, tokenizer)
    assert folder
    if config.document_mask:
        check_ends(folder, "data.document_mask=true")
    return map_tokens(folder)


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
        if config.source is Source.chat:
            whole = _answered(whole, seq_len, named["name"])
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


def _answered(documents: Documents, seq_len: int, name: str) -> Documents:
    """Return the beginnings of conversations that fit a sequence, without those that are cut before
    any answer. Raises ConfigError if none is left.
    """
    found = documents.first(seq_len + 1)
    cut = np.flatnonzero(documents.lengths_D > found.lengths_D)
    silent = [each for each in cut if not trained(found.read(int(each), 1, seq_len + 1)).any()]
    if len(silent) == len(found):
        rule = f"every conversation of the {name} is cut before its first answer"
        least = -(-int(documents.lengths_D.min()) // 64) * 64
        raise ConfigError("train.seq_len", seq_len, rule, nearest=least)
    return found.select(np.setdiff1d(np.arange(len(found)), silent)) if silent else found


def _cut(config: DataConfig, documents: Documents, seq_len: int) -> str | None:
    """Say what of long conversations is left out; None: nothing."""
    if config.source is not Source.chat or config.packing is not Packing.best_fit:
        return None
    longer = documents.lengths_D - documents.first(seq_len + 1).lengths_D
    count, lost = int((longer > 0).sum()), int(longer.sum())
    if not count:
        return None
    share = lost / documents.lengths_D.sum()
    return (
        f"{count:,} of {len(documents):,} conversations are longer than train.seq_len={seq_len}; "
        f"the rest of each is left out, {lost:,} tokens ({share:.1%})"
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
    held = config.validation_documents
    return _stream(stream, config, seq_len, seed, tokenizer, held_out=held), held_out


def _stream(
    documents: IterableDataset,
    config: DataConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    held_out: int,
) -> StreamedSequences:
    return StreamedSequences(
        documents,
        held_out,
        tokenizer,
        seq_len=seq_len,
        seed=seed,
        max_documents=config.most_documents(seq_len),
    )
