"""Documents as one stream of tokens, cut into sequences whose content depends on the seed alone.

Shapes: D documents, K sequences per epoch, S tokens per sequence, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from app.errors import ConfigError, FirstOf, Instead


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

    def select(self, chosen: np.ndarray) -> Documents:
        """The documents with these indices, or where this mask is true."""
        return Documents(
            self.chunks,
            self.chunk_D[chosen],
            self.start_D[chosen],
            lengths_D=self.lengths_D[chosen],
        )

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
class _Epoch:
    """Order of one epoch: document `documents_D[d]` covers tokens [bounds[d], bounds[d + 1])."""

    index: int
    documents_D: np.ndarray
    bounds: np.ndarray  # [D + 1]
    sequences_K: np.ndarray  # which stretch of the epoch is its k-th sequence


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
    ) -> None:
        """`lengths` [D] tokens per document; `read(document, start, stop)` its tokens; `name` is
        for the message, with the option that says how much this split gets, `share`, and values of
        it that give it more.

        Raises ConfigError when there are fewer than seq_len + 1 tokens.
        """
        self.lengths_D = np.asarray(lengths, dtype=np.int64)
        self.read = read
        self.seq_len = seq_len
        self.seed = seed
        self.num_tokens = int(self.lengths_D.sum())
        self.per_epoch = (self.num_tokens - 1) // seq_len  # sequences
        if self.per_epoch < 1:
            rule = f"the {name} has only {self.num_tokens} tokens, one sequence needs {seq_len + 1}"
            rule += f", and {share} says how much it gets" if share else ""
            near = (FirstOf(_shorter(self.num_tokens)), FirstOf(larger))
            raise ConfigError("train.seq_len", seq_len, rule, nearest=near)
        self._epoch = self._order(0)

    def sample(self, index: int) -> np.ndarray:
        """Tokens of global sequence `index`, int64 [S + 1]."""
        epoch, k = divmod(index, self.per_epoch)
        if epoch != self._epoch.index:  # indices rise, so one epoch at a time is enough
            self._epoch = self._order(epoch)
        start = int(self._epoch.sequences_K[k]) * self.seq_len
        return np.concatenate(
            self._pieces(self._epoch, start, start + self.seq_len + 1), dtype=np.int64
        )

    def reader(
        self, _dp_rank: int, _dp: int, _sequences: int, state: dict[str, Any] | None
    ) -> PackedSequences:
        """Itself: any rank may read any sequence. ConfigError for the state of a stream."""
        if state is not None:
            raise ConfigError(
                "data.streaming", False, "the saved position is a stream's", nearest=True
            )
        return self

    def state(self) -> None:
        """Nothing: the count of used sequences says it all."""

    def tokens(self, limit: int) -> np.ndarray:
        """At most `limit` tokens, in epoch 0's order of documents: [T], in the stored type."""
        return np.concatenate(self._pieces(self._order(0), 0, min(limit, self.num_tokens)))

    def _order(self, epoch: int) -> _Epoch:
        generator = np.random.default_rng([self.seed, epoch])
        documents_D = generator.permutation(len(self.lengths_D))
        bounds = np.concatenate([[0], np.cumsum(self.lengths_D[documents_D])])
        return _Epoch(epoch, documents_D, bounds, sequences_K=generator.permutation(self.per_epoch))

    def _pieces(self, epoch: _Epoch, start: int, stop: int) -> list[np.ndarray]:
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
