"""Sequences of whole documents: best-fit decreasing instead of a stream that is cut.

Shapes: P pieces of documents, K sequences per epoch, S tokens per sequence.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from app.data.packing import PADDING, Documents, Epoch, PackedSequences, runs


def best_fit(lengths_P: np.ndarray, capacity: int, most: int) -> np.ndarray:
    """Bin of every piece, from 0: none has more than `capacity` tokens or `most` pieces.

    The longest piece first, each into the fullest bin that has room for it; of equal ones, the
    first that became so full (best-fit decreasing, Johnson 1974). Bins of equal room are filled
    together, so that time depends on the number of different lengths more than on P.
    """
    narrow = np.uint16 if capacity < 2**16 else np.int64  # numpy sorts 16 bits by radix
    order_P = np.argsort((capacity - lengths_P).astype(narrow), kind="stable")
    descending = lengths_P[order_P]
    borders = [0, *(np.flatnonzero(np.diff(descending)) + 1).tolist(), len(descending)]
    bin_P = np.empty(len(lengths_P), np.int64)
    counts = np.zeros(len(lengths_P), np.int64)  # pieces of each bin
    with_room: dict[int, list[np.ndarray]] = {}  # bins by their room, in the order they came
    rooms: list[int] = []  # the keys, ascending
    opened = 0
    for begin, end in pairwise(borders):
        left = order_P[begin:end]
        while len(left):
            length = int(descending[begin])
            if (at := bisect_left(rooms, length)) < len(rooms):
                room = rooms.pop(at)
                bins = np.concatenate(with_room.pop(room))
            else:
                room, bins = capacity, opened + np.arange(len(left))
            # A bin stays the fullest one with room until the next piece does not fit.
            fit = np.minimum(room // length, most - counts[bins])
            used = int(np.searchsorted(np.cumsum(fit), len(left))) + 1
            fit = fit[:used]
            filled = np.repeat(bins[:used], fit)[: len(left)]
            bin_P[left[: len(filled)]] = filled
            taken = np.bincount(np.repeat(np.arange(len(fit)), fit)[: len(left)])
            counts[bins[:used]] += taken
            if room == capacity:
                opened += len(taken)
                bins = bins[: len(taken)]
            after = np.full(len(bins), room)
            after[: len(taken)] -= taken * length
            for value in np.unique(after).tolist():
                kept = bins[(after == value) & (counts[bins] < most)]
                if value and len(kept):
                    if value not in with_room:
                        insort(rooms, value)
                    with_room.setdefault(value, []).append(kept)
            left = left[len(filled) :]
    return bin_P


def apart(documents: Documents, boundary: int) -> Documents:
    """Documents that contain ends of documents, cut behind each of these. Reads all tokens."""
    inside = documents.ends_inside(boundary)
    if not len(inside.offsets):
        return documents
    all_D = np.arange(len(documents))
    counts_D = inside.counts_D + 1
    of_P = np.repeat(all_D, counts_D)
    begins = np.zeros(len(of_P), np.int64)
    begins[runs(np.cumsum(counts_D) - counts_D + 1, inside.counts_D)] = inside.offsets
    ends = np.append(begins[1:], 0)
    ends[np.cumsum(counts_D) - 1] = documents.lengths_D
    found = Documents(
        documents.chunks,
        documents.chunk_D[of_P],
        documents.start_D[of_P] + begins,
        lengths_D=ends - begins,
    )
    # The only text of a corpus is cut in two, perhaps within a document, which then has no end.
    whole = found.read(len(found) - 1, int(found.lengths_D[-1]) - 1, int(found.lengths_D[-1]))
    return found if whole == boundary else found.select(np.arange(len(found) - 1))


class BestFitSequences(PackedSequences):
    """Sequences that are addressed as `PackedSequences`, of documents that are not cut.

    A document longer than a sequence is cut into pieces of S + 1 tokens, of which neighbours share
    one, and a rest. In every epoch pieces are put in an order drawn from (seed, epoch), which
    decides between equally long ones, and distributed by `best_fit`; padding follows the last one.
    Every token is predicted once per epoch, but for the first of each document.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        read: Callable[[int, int, int], np.ndarray],
        seq_len: int,
        seed: int,
        max_documents: int,
        **named: Any,
    ) -> None:
        """The arguments of `PackedSequences`; documents contain no further ends (`apart`)."""
        super().__init__(lengths, read, seq_len, seed, max_documents=max_documents, **named)
        # The last token of a full sequence is predicted and not read.
        held = np.minimum(np.diff(self._epoch.stretches), seq_len).sum()
        self.padding = 1 - int(held) / (self.per_epoch * seq_len)

    def sample(self, index: int) -> np.ndarray:
        """Tokens of global sequence `index`, PADDING at the end of a short one: int64 [S + 1]."""
        epoch = self._epoch_of(index)
        k = int(epoch.sequences_K[index - epoch.first])
        start, stop = epoch.stretches[k : k + 2].tolist()
        row = np.full(self.seq_len + 1, PADDING, np.int64)
        row[: stop - start] = np.concatenate(self._pieces(epoch, start, stop))
        return row

    def tokens(self, limit: int) -> np.ndarray:
        """At most `limit` tokens, in epoch 0's order of documents: [T], in the stored type."""
        order = super()._order(0, 0)
        return np.concatenate(super()._pieces(order, 0, min(limit, self.num_tokens)))

    def _order(self, epoch: int, first: int) -> Epoch:
        assert self.max_documents is not None
        size = self.seq_len
        generator = np.random.default_rng([self.seed, epoch])
        order_D = generator.permutation(len(self.lengths_D))
        lengths_D = self.lengths_D[order_D]
        counts_D = np.maximum(lengths_D + size - 2, 0) // size  # of one token: nothing to predict
        document_P = np.repeat(order_D, counts_D)
        start_P = runs(np.zeros_like(counts_D), counts_D) * size
        length_P = np.minimum(np.repeat(lengths_D, counts_D) - start_P, size + 1)
        bin_P = best_fit(length_P, size + 1, self.max_documents)
        by_bin = np.argsort(bin_P, kind="stable")
        bounds = np.concatenate(([0], np.cumsum(length_P[by_bin])))
        last_K = np.cumsum(np.bincount(bin_P)) if len(bin_P) else np.empty(0, np.int64)
        return Epoch(
            epoch,
            first,
            document_P[by_bin],
            bounds=bounds,
            stretches=bounds[np.concatenate(([0], last_K))],
            sequences_K=generator.permutation(len(last_K)),
            starts_D=start_P[by_bin],
        )

    def _pieces(self, epoch: Epoch, start: int, stop: int) -> Sequence[np.ndarray]:
        first = int(np.searchsorted(epoch.bounds, start))
        last = int(np.searchsorted(epoch.bounds, stop))
        assert epoch.starts_D is not None
        lengths = np.diff(epoch.bounds[first : last + 1]).tolist()
        return [
            self.read(document, begin, begin + length)
            for document, begin, length in zip(
                epoch.documents_D[first:last].tolist(),
                epoch.starts_D[first:last].tolist(),
                lengths,
                strict=True,
            )
        ]
