"""Documents as one stream of tokens, cut into sequences whose content depends on the seed alone.

Shapes: D documents, K sequences per epoch, S tokens per sequence, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from app.errors import ConfigError, FirstOf, Instead

PADDING = -1  # in place of a token behind the last document of a sequence


@dataclass(frozen=True)
class Documents:
    """Tokens of documents that stay where arrow holds them, usually a memory-mapped file. Every
    document ends with eod.
    """

    chunks: tuple[np.ndarray, ...]  # flat tokens of each arrow chunk
    chunk_D: np.ndarray  # chunk of each document
    start_D: np.ndarray  # first token within that chunk
    lengths_D: np.ndarray  # tokens, eod included

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray) -> Documents:
        """View a column of lists of integers, one list per document, without copying its values."""
        # DLPack: pyarrow's to_numpy would load pandas, half a second of every start
        offsets = [np.from_dlpack(chunk.offsets).astype(np.int64) for chunk in column.chunks]
        return cls(
            chunks=tuple(np.from_dlpack(chunk.values) for chunk in column.chunks),
            chunk_D=np.repeat(np.arange(len(offsets)), [len(o) - 1 for o in offsets]),
            start_D=np.concatenate([np.empty(0, np.int64), *(o[:-1] for o in offsets)]),
            lengths_D=np.concatenate([np.empty(0, np.int64), *(np.diff(o) for o in offsets)]),
        )

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[int] | np.ndarray]) -> Documents:
        """Documents given as sequences of ids, eod included."""
        arrays = [np.asarray(ids, dtype=np.int64) for ids in documents]
        starts_D = np.zeros(len(arrays), np.int64)
        lengths_D = np.array([len(ids) for ids in arrays], np.int64)
        return cls(tuple(arrays), np.arange(len(arrays)), starts_D, lengths_D)

    def __len__(self) -> int:
        return len(self.lengths_D)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of one document, a view [stop - start] in the stored type."""
        first = self.start_D[document]
        chunk: np.ndarray = self.chunks[self.chunk_D[document]]
        return chunk[first + start : first + stop]

    def ends_inside(self, token: int) -> EndsInside:
        """Where this token ends a document before its last one does, as in a text file of many
        documents. Reads all tokens.
        """
        counts_D = np.zeros(len(self), np.int64)
        by_chunk = np.argsort(self.chunk_D, kind="stable")
        borders = np.searchsorted(self.chunk_D[by_chunk], np.arange(len(self.chunks) + 1))
        found: dict[int, np.ndarray] = {}
        for chunk, (begin, end) in zip(self.chunks, pairwise(borders), strict=True):
            places = np.flatnonzero(chunk == token)
            here = by_chunk[begin:end]
            first = np.searchsorted(places, self.start_D[here])
            last = np.searchsorted(places, self.start_D[here] + self.lengths_D[here] - 1)
            counts_D[here] = np.maximum(last - first, 0)
            for each in np.flatnonzero(last > first).tolist():
                document = int(here[each])
                inside = places[first[each] : last[each]]
                found[document] = inside - self.start_D[document] + 1
        offsets = [found[document] for document in sorted(found)]
        return EndsInside(counts_D, np.concatenate((np.empty(0, np.int64), *offsets)))

    def select(self, chosen: np.ndarray) -> Documents:
        """The documents with these indices, or where this mask is true."""
        return Documents(
            self.chunks,
            self.chunk_D[chosen],
            self.start_D[chosen],
            lengths_D=self.lengths_D[chosen],
        )

    def first(self, tokens: int) -> Documents:
        """At most so many first tokens of every document."""
        lengths_D = np.minimum(self.lengths_D, tokens)
        return Documents(self.chunks, self.chunk_D, self.start_D, lengths_D=lengths_D)

    def split(self, fraction: float) -> tuple[Documents, Documents]:
        """Train and validation documents; every 1/fraction-th document is for validation, at least
        one on each side.

        Depends on the order of the documents only. A single document is cut: its last tokens are
        for validation.
        """
        if len(self) == 1:
            return self._cut(fraction)
        count = min(max(round(len(self) * fraction), 1), len(self) - 1)
        held_D = np.zeros(len(self), dtype=bool)
        held_D[((np.arange(count) + 0.5) * len(self) / count).astype(np.int64)] = True
        return self.select(~held_D), self.select(held_D)

    def _cut(self, fraction: float) -> tuple[Documents, Documents]:
        kept_D = self.lengths_D - np.ceil(self.lengths_D * fraction).astype(np.int64)
        return (
            Documents(self.chunks, self.chunk_D, self.start_D, lengths_D=kept_D),
            Documents(
                self.chunks, self.chunk_D, self.start_D + kept_D, lengths_D=self.lengths_D - kept_D
            ),
        )


@dataclass(frozen=True)
class EndsInside:
    """Ends of documents within the texts of a corpus."""

    counts_D: np.ndarray  # of each text
    offsets: np.ndarray  # from the first token of their text; text by text, ascending

    def along(self, texts: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """The ends in tokens of a stream in which these texts start at these tokens."""
        counts = self.counts_D[texts]
        first_D = np.cumsum(self.counts_D) - self.counts_D
        ends: np.ndarray = np.repeat(starts, counts) + self.offsets[runs(first_D[texts], counts)]
        return ends


def runs(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, … as many as counts[0], then those of the next."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(counts.sum())


@dataclass(frozen=True)
class Epoch:
    """Order of one epoch: document `documents_D[d]` covers tokens [bounds[d], bounds[d + 1])."""

    index: int
    first: int  # global index of its first sequence
    documents_D: np.ndarray
    bounds: np.ndarray  # [D + 1]
    stretches: np.ndarray  # stretch k covers the tokens [stretches[k], stretches[k + 1])
    sequences_K: np.ndarray  # which stretch of the epoch is its k-th sequence
    starts_D: np.ndarray | None = None  # first token in its document, of parts of documents


def cut_stretches(ends: np.ndarray, length: int, most: int) -> np.ndarray:
    """Cut a stream of tokens into stretches of `length` tokens, shorter ones where that many would
    have parts of more than `most` documents: those end with their last document.

    ends: where documents end, ascending; the last one is the end of the stream. The token after a
    stretch of full length is in the stream too. Returns the first token of every stretch, and where
    the last one ends.
    """
    found = [np.empty(0, np.int64)]
    start, count = 0, 64
    tokens = int(ends[-1]) if len(ends) else 0
    padded = np.concatenate((ends, np.full(most, tokens + length)))
    while start + length < tokens:
        # 1. Full stretches up to the first that has too many documents.
        starts = np.arange(start, min(start + count * length, tokens - length), length)
        too_many = padded[np.searchsorted(ends, starts, side="right") + most - 1] < starts + length
        full = int(np.argmax(too_many)) if too_many.any() else len(starts)
        found.append(starts[:full])
        start += full * length
        count = min(2 * count, 1 << 16)
        if full == len(starts):
            continue
        # 2. Stretches of `most` documents up to the first that has room for more.
        begin = int(np.searchsorted(ends, start, side="right"))
        borders = np.concatenate(([start], ends[begin + most - 1 :: most][: count + 1]))
        others = (np.diff(borders) >= length) | (borders[:-1] + length >= tokens)
        short = int(np.argmax(others)) if others.any() else len(others)
        found.append(borders[:short])
        start = int(borders[short])
        count = 64
    return np.concatenate((*found, [start]))


def _shorter(num_tokens: int) -> list[int]:
    """Lengths of sequences for which so few tokens are enough, round ones first."""
    most = num_tokens - 1
    rounded = [most // unit * unit for unit in (1024, 64, 1) if most >= unit]
    # the other split may be shorter: of a tenth of the documents by default
    parts = (most // part // 1024 * 1024 for part in (16, 256, 4096))
    return list(
        dict.fromkeys(
            each for each in (*rounded[:1], *parts, *rounded[1:], 128) if 0 < each <= most
        )
    )


class PackedSequences:
    """Sequences of `seq_len` + 1 tokens out of documents, addressed by a global index that runs on
    through the epochs.

    In every epoch the documents are put in an order drawn from (seed, epoch) and laid end to end;
    stretch k covers the tokens [k·S, k·S + S + 1), so that each token but the first is predicted
    once, and the stretches are visited in an order drawn likewise. What is left after the last full
    stretch is dropped. The content of sequence i thus depends on nothing but the seed, and the
    position of a run in its data is one integer.

    Where at most `max_documents` documents may share a sequence, a stretch that would have more
    ends with its last document, padding follows, and the next stretch begins there
    (`cut_stretches`). Epochs then differ in how many sequences they have.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        read: Callable[[int, int, int], np.ndarray],
        seq_len: int,
        seed: int,
        name: str = "corpus",
        share: str | None = None,
        larger: Sequence[Instead] = (),
        max_documents: int | None = None,
        inside: EndsInside | None = None,
    ) -> None:
        """`lengths` [D] tokens per document; `read(document, start, stop)` its tokens; `name` is
        for the message, with the option that says how much this split gets, `share`, and values of
        it that give it more. `inside` says where documents contain further ends, which count for
        `max_documents`; None of either: nowhere, any number.

        Raises ConfigError when there are fewer than seq_len + 1 tokens.
        """
        self.lengths_D = np.asarray(lengths, dtype=np.int64)
        self.read = read
        self.seq_len = seq_len
        self.seed = seed
        self.num_tokens = int(self.lengths_D.sum())
        self.max_documents = max_documents
        self.inside = inside
        self._epoch = self._order(0, 0)
        self.per_epoch = len(self._epoch.sequences_K)  # of the first one
        if self.per_epoch < 1:
            tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
            rule = f"the {name} has only {tokens}, one sequence needs {seq_len + 1}"
            rule += f", and {share} says how much it gets" if share else ""
            near = (FirstOf(_shorter(self.num_tokens)), FirstOf(larger))
            raise ConfigError("train.seq_len", seq_len, rule, nearest=near)
        # share of the first epoch's positions
        self.padding = 1 - int(self._epoch.stretches[-1]) / (self.per_epoch * seq_len)

    def sample(self, index: int) -> np.ndarray:
        """Tokens of global sequence `index`, PADDING at the end of a short one: int64 [S + 1]."""
        epoch = self._epoch_of(index)
        k = int(epoch.sequences_K[index - epoch.first])
        start, stop = epoch.stretches[k : k + 2].tolist()
        if stop - start == self.seq_len:
            return np.concatenate(self._pieces(epoch, start, stop + 1), dtype=np.int64)
        row = np.full(self.seq_len + 1, PADDING, np.int64)
        row[: stop - start] = np.concatenate(self._pieces(epoch, start, stop))
        return row

    def _epoch_of(self, index: int) -> Epoch:
        """The epoch of a sequence; indices rise, so one epoch at a time is enough."""
        epoch = self._epoch
        if self.max_documents is None:  # all are equally long
            number = index // self.per_epoch
            if number != epoch.index:
                epoch = self._order(number, number * self.per_epoch)
        elif index < epoch.first:
            epoch = self._order(0, 0)
        while index >= epoch.first + len(epoch.sequences_K):
            epoch = self._order(epoch.index + 1, epoch.first + len(epoch.sequences_K))
        self._epoch = epoch
        return epoch

    def reader(
        self, _dp: int, _micro_batch: int, _sequences: int, state: dict[str, Any] | None
    ) -> PackedSequences:
        """Itself: any rank may read any sequence. ConfigError for the state of a stream."""
        if state is not None:
            raise ConfigError(
                "data.streaming", False, "the saved position is a stream's", nearest=True
            )
        return self

    def state(self, _sequences: int) -> None:
        """Nothing: the count of used sequences says it all."""

    def tokens(self, limit: int) -> np.ndarray:
        """At most `limit` tokens, in epoch 0's order of documents: [T], in the stored type."""
        return np.concatenate(self._pieces(self._order(0, 0), 0, min(limit, self.num_tokens)))

    def _order(self, epoch: int, first: int) -> Epoch:
        """An epoch, of which the global index of the first sequence is known."""
        generator = np.random.default_rng([self.seed, epoch])
        documents_D = generator.permutation(len(self.lengths_D))
        bounds = np.concatenate([[0], np.cumsum(self.lengths_D[documents_D])])
        if self.max_documents is None:
            count = max((self.num_tokens - 1) // self.seq_len, 0)
            stretches = np.arange(count + 1) * self.seq_len
        else:
            ends = bounds[1:]
            if self.inside is not None and len(self.inside.offsets):
                ends = np.sort(np.concatenate((ends, self.inside.along(documents_D, bounds[:-1]))))
            stretches = cut_stretches(ends, self.seq_len, self.max_documents)
        return Epoch(
            epoch,
            first,
            documents_D,
            bounds=bounds,
            stretches=stretches,
            sequences_K=generator.permutation(len(stretches) - 1),
        )

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self.lengths_D)

    def padding_with(self, max_documents: int) -> float:
        """Share of padding with another `max_documents`."""
        other = type(self)(
            self.lengths_D,
            self.read,
            self.seq_len,
            seed=self.seed,
            max_documents=max_documents,
            inside=self.inside,
        )
        return other.padding

    def _pieces(self, epoch: Epoch, start: int, stop: int) -> Sequence[np.ndarray]:
        """Tokens [start, stop) of an epoch, document by document."""
        first = int(np.searchsorted(epoch.bounds, start, side="right")) - 1
        last = int(np.searchsorted(epoch.bounds, stop, side="left"))
        begins = epoch.bounds[first:last].tolist()
        ends = epoch.bounds[first + 1 : last + 1].tolist()
        return [
            self.read(document, max(start - begin, 0), min(stop, end) - begin)
            for document, begin, end in zip(
                epoch.documents_D[first:last].tolist(), begins, ends, strict=True
            )
        ]
