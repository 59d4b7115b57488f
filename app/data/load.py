"""From `DataConfig` to the two splits that a run reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.choices import Packing, Source
from app.config import DataConfig
from app.data.best_fit import BestFitSequences, apart
from app.data.feed import DataSplit
from app.data.packing import Documents, EndsInside, PackedSequences
from app.data.paths import source_option
from app.data.prepared import check_ends, map_tokens, prepare_tokens
from app.data.sources import Sources, find_sources
from app.data.stream import StreamedSequences, encoder
from app.data.tokenizer import Tokenizer
from app.data.truncate import truncated
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
    cut = held_cut = None
    if config.streaming:
        train, held_out = _streamed(config, seq_len, seed, tokenizer=tokenizer)
    else:
        both = _mapped(config, tokenizer, prepared)
        _check_two(config, both, of)
        documents, held_out = both.split(config.validation_fraction)
        documents, cut = _short(config, documents, seq_len, f"{of} for training")
        held_out, held_cut = _short(config, held_out, seq_len, f"{of} for validation")
        train = _packed(config, documents, seq_len, seed, tokenizer, name=f"training split{of}")
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
    splits = ((train, cut), (validation, held_cut))
    found, held = (split_of(config, each, tokenizer, cut) for each, cut in splits)
    return found, held


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
    documents, cut = _short(config, _mapped(config, tokenizer, prepared), seq_len, of)
    packed = _packed(config, documents, seq_len, seed, tokenizer, name=f"data{of}")
    return split_of(config, packed, tokenizer, cut)


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
        whole = documents if config.source is Source.chat else apart(documents, boundary)
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


def _short(
    config: DataConfig, documents: Documents, seq_len: int, of: str = ""
) -> tuple[Documents, str | None]:
    """Return what is kept of long conversations, and a line about the rest; all other documents
    are cut as sequences need it. Raises ConfigError.
    """
    if config.source is not Source.chat or config.packing is not Packing.best_fit:
        return documents, None
    found = truncated(documents, seq_len, config.truncate, of)
    return found.documents, found.said


def _check_two(config: DataConfig, documents: Documents, of: str) -> None:
    """Raise ConfigError for one conversation that training and validation would divide."""
    if config.source is Source.chat and len(documents) == 1:
        rule = f"one conversation{of} in all, and validation needs one of its own"
        advice = "give more, or others in data.validation"
        raise ConfigError(*source_option(config), rule, advice=advice)


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
    encode = encoder(tokenizer, config.source is Source.chat)
    encoded = (encode(text) for text in texts if text)
    held_out = Documents.from_lists([ids for ids in encoded if len(ids)])
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
        encoder(tokenizer, config.source is Source.chat),
        tokenizer.eod,
        seq_len=seq_len,
        seed=seed,
        max_documents=config.most_documents(seq_len),
    )
