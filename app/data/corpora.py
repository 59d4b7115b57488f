"""All sources of a run: what each is made of, its cache, and the splits that they make together.

A run of one source has one corpus, whose label is "". Every function works corpus by corpus with
those of `app.data.sources` and `app.data.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.choices import AfterEnd
from app.config import DataConfig
from app.data.blend import BlendedSequences, BlendPart
from app.data.feed import DataSplit
from app.data.load import load_data, load_whole, prepare, split_of
from app.data.prepared import left_out
from app.data.sources import VALIDATION, Record, Sources, find_sources, text_sum
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

Folders = Mapping[str, Path | None]  # label -> cache; None: a stream has none


def corpora(config: DataConfig) -> dict[str, DataConfig]:
    """Return the configuration of every corpus by its label."""
    found = {entry.label: alone for entry, alone in config.parts} or {"": config}
    held = {VALIDATION + entry.label: alone for entry, alone in config.validation_parts}
    return found | held


@dataclass(frozen=True, slots=True)
class Corpora:
    """What the corpora of a run are made of, by their labels."""

    sources: Mapping[str, Sources]

    @classmethod
    def find(cls, config: DataConfig) -> Corpora:
        """Look at every file. Raises ConfigError as `find_sources`."""
        return cls({label: find_sources(alone) for label, alone in corpora(config).items()})

    def record(self) -> Record:
        """The record of a single source; of several, with that of each under `parts`."""
        if self.sources.keys() == {""}:
            return self.sources[""].record()
        parts = {label: each.record() for label, each in self.sources.items()}
        return {
            "count": sum(part["count"] for part in parts.values()),
            "bytes": sum(part["bytes"] for part in parts.values()),
            "sum": text_sum(repr([(label, part["sum"]) for label, part in parts.items()])),
            "revision": None,
            "tokenizer": next(iter(parts.values()))["tokenizer"],
            "files": None,
            "parts": parts,
        }


def prepare_all(
    config: DataConfig, tokenizer: Tokenizer, found: Corpora, say: Callable[[str], object] = print
) -> Folders:
    """Tokenize every corpus into the cache unless it is there. Raises ConfigError as `prepare`."""
    return {
        label: prepare(alone, tokenizer, found.sources[label], say=say)
        for label, alone in corpora(config).items()
    }


def all_left_out(folders: Folders, found: Corpora) -> Iterator[str]:
    """Yield a line for every corpus of which files were left out."""
    for label, folder in folders.items():
        if folder is not None and (line := left_out(folder, found.sources[label])):
            yield f"{label}: {line}" if label else line


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Validation data of one source."""

    label: str  # "" if they are the only ones
    weight: float  # of its loss in the mean over all
    split: DataSplit


def load_all(
    config: DataConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer,
    folders: Folders,
) -> tuple[DataSplit, tuple[HeldOut, ...]]:
    """Return training data and all validation data.

    Validation documents of their own, or else each source's held-out ones, whose losses count by
    the weights of the sources. Raises ConfigError as `load_data`.
    """

    def of(label: str) -> dict[str, Any]:
        named = label.removeprefix(VALIDATION)
        return {"prepared": folders.get(label), "of": f" of {named}" if named else ""}

    splits: list[tuple[DataSplit, HeldOut | None]] = []
    entries = config.parts or ((None, config),)
    for entry, alone in entries:
        label, weight = (entry.label, entry.weight) if entry else ("", 1.0)
        try:
            if config.validation:
                splits.append((load_whole(alone, seq_len, seed, tokenizer, **of(label)), None))
                continue
            train, held = load_data(alone, seq_len, seed, tokenizer, **of(label))
        except ConfigError as error:
            if entry is None or error.key != "train.seq_len":
                raise
            advice = "leave it out, give it more documents, or lower train.seq_len"
            raise ConfigError("data.sources", label, error.rule, advice=advice) from error
        splits.append((train, HeldOut(label, weight, held)))
    own = [
        HeldOut(
            entry.label,
            entry.weight,
            load_whole(alone, seq_len, 0, tokenizer, **of(VALIDATION + entry.label)),
        )
        for entry, alone in config.validation_parts
    ]
    train = _together(config, [split for split, _ in splits], tokenizer)
    found = own or [held for _, held in splits if held is not None]
    return train, _named(found)


def _named(found: Sequence[HeldOut]) -> tuple[HeldOut, ...]:
    """Return them with the only one unnamed."""
    if len(found) == 1:
        return (HeldOut("", 1.0, found[0].split),)
    return tuple(found)


def _together(config: DataConfig, splits: Sequence[DataSplit], tokenizer: Tokenizer) -> DataSplit:
    if not config.sources:
        return splits[0]
    parts = []
    for entry, split in zip(config.sources, splits, strict=True):
        assert not isinstance(split.sequences, BlendedSequences), "a source is no blend"
        repeats = entry.after_end is AfterEnd.repeat
        parts.append(BlendPart(entry.label, entry.weight, repeats, split.sequences))
    cut = "; ".join(split.cut for split in splits if split.cut) or None
    return split_of(config, BlendedSequences(tuple(parts)), tokenizer, cut)
