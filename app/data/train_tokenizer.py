"""Training of a byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2) on the texts of
a run, by the `tokenizers` library.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from app.choices import Source
from app.config import DataConfig
from app.data.corpus import DocumentReader
from app.data.sources import find_sources
from app.data.special_tokens import SETTINGS
from app.data.tokenizer_files import TOKENIZER
from app.errors import ConfigError, writing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END = "<|endoftext|>"
BYTES = 256  # ids of single bytes, which every vocabulary has
HELD_OUT, FIRST_HELD_OUT = 100, 10  # one of so many documents is left out, from this one on
MOST_HELD_OUT = 2**22  # bytes of documents that are left out
# No merge crosses these: a word with the space before it, up to three digits, a run of signs with
# the space before it, ends of lines, other spaces but for the last one before a word.
PIECES = r" ?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a tokenizer is to have."""

    size: int  # ids
    special: tuple[str, ...] = ()  # special tokens besides END
    most_bytes: int = 10**9  # of text to read

    def __post_init__(self) -> None:
        twice = [token for token in self.tokens if self.tokens.count(token) > 1]
        if twice:
            raise ConfigError("--special", twice[0], "is given twice, or ends documents already")
        least = BYTES + len(self.tokens)
        if self.size < least:
            rule = f"must be at least {least}: {BYTES} bytes and {len(self.tokens)} special tokens"
            raise ConfigError("--size", self.size, rule, nearest=least)

    @property
    def tokens(self) -> tuple[str, ...]:
        """All special tokens."""
        return (END, *self.special)


@dataclass(slots=True)
class Share:
    """Documents of a source that were read."""

    documents: int = 0
    size: int = 0  # bytes
    held_out: list[str] = field(default_factory=list)
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """A tokenizer, and what it was trained on."""

    backend: Backend
    shares: Mapping[str, Share]  # by the label of a source

    @property
    def bytes_per_token(self) -> float | None:
        """Of documents that were left out; None: there are none."""
        texts = [text for share in self.shares.values() for text in share.held_out]
        size = sum(len(text.encode()) for text in texts)
        tokens = sum(len(each.ids) for each in self.backend.encode_batch_fast(texts))
        return size / tokens if tokens else None

    def write(self, folder: Path) -> None:
        """Write the files that `data.tokenizer` and `AutoTokenizer` read. Raises ConfigError."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.backend.save(str(folder / TOKENIZER))
            settings = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END,
                "clean_up_tokenization_spaces": False,
            }
            (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def trained(config: DataConfig, wanted: Wanted) -> Trained:
    """Train a tokenizer on a run's documents, in shares of their sources' weights.

    Raises ConfigError as `find_sources`, and for texts that do not make so many tokens.
    """
    entries = [(entry.label, entry.weight, alone) for entry, alone in config.parts]
    entries = entries or [("", 1.0, config)]
    total = sum(weight for _, weight, _ in entries)
    shares = {label: Share() for label, _, _ in entries}
    texts = chain.from_iterable(
        _texts(alone, shares[label], int(wanted.most_bytes * weight / total))
        for label, weight, alone in entries
    )
    backend = _learnt(texts, wanted)
    if (found := backend.get_vocab_size()) < wanted.size:
        rule = f"the texts make {found:,} tokens at most"
        raise ConfigError("--size", wanted.size, rule, nearest=found)
    return Trained(backend, shares)


def _learnt(texts: Iterator[str], wanted: Wanted) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=wanted.size,
        special_tokens=list(wanted.tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _texts(config: DataConfig, share: Share, most_bytes: int) -> Iterator[str]:
    """Yield documents of a source until there are so many bytes; count and leave out some."""
    for number, text in enumerate(filter(None, _all_texts(config)), start=1):
        size = len(text.encode())
        if number % HELD_OUT == FIRST_HELD_OUT and share.held_bytes < MOST_HELD_OUT:
            share.held_out.append(text)
            share.held_bytes += size
            continue
        share.documents += 1
        share.size += size
        yield text
        if share.size >= most_bytes:
            return


def _all_texts(config: DataConfig) -> Iterator[str | None]:
    """Yield all documents of a source. Raises ConfigError where none has text."""
    if config.source in (Source.megatron, Source.chat):
        held = "tokens" if config.source is Source.megatron else "conversations"
        rule = f"holds {held}, and a tokenizer is trained on text"
        raise ConfigError("data.source", config.source, rule)
    if config.streaming:
        from app.data.hub import streamed  # imports `datasets`

        yield from (text for row in streamed(config) for text in row.values())
        return
    with tempfile.TemporaryDirectory() as cache:
        reader = DocumentReader(config, find_sources(config), Path(cache))
        any_text = False
        for _, document in reader.documents():
            any_text = any_text or bool(document)
            yield document.decode()
        if not any_text:
            raise reader.nothing()
