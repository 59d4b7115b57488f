"""Sequences to microbatches, and the position of a run in its data.

Shapes: B sequences per microbatch, S tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from app.data.blend import BlendedSequences, BlendReader
from app.data.marks import ends, ids_of_marked, trained
from app.data.packing import PADDING, PackedSequences
from app.data.reader import Reader
from app.data.stream import StreamedSequences, merged

IGNORED = -100  # label of a position without a target


@dataclass(frozen=True)
class DataSplit:
    """Train or validation data."""

    sequences: PackedSequences | StreamedSequences | BlendedSequences
    boundary: int | None  # id that ends a document when documents are kept apart, otherwise None
    max_documents: int | None = None  # of a sequence, then
    marked: bool = False  # has tokens of conversations (`app.data.marks`)
    cut: str | None = None  # what of long conversations is left out; None: nothing


@dataclass(frozen=True)
class Batch:
    """One microbatch, mostly int64. The feed gives whole sequences on the CPU; `Loader` in
    `app.engine.step.step` makes of them the tokens of this rank on its device.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor  # the token that follows; -100: no target
    # within the sequence, or within the document when documents are kept apart
    positions_BS: torch.Tensor
    # int32; where the documents of each whole sequence end, padded with S; None: not kept apart
    ends_BD: torch.Tensor | None
    sources_B: torch.Tensor | None = None  # of each sequence, its place in a blend; None: no blend
    # what features of training read of whole sequences, by name, … × S (`StepState.inputs`)
    extras: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Cursor:
    """Position of a run in its training data; `stream` differs by data-parallel rank, and those of
    all ranks make the position (`merged`).
    """

    sequences: int = 0  # used by all data-parallel ranks together
    stream: dict[str, Any] | None = None  # of a stream, or of several sources

    def state(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries only: fit for JSON and for
        `torch.load(weights_only=True)`.
        """
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Cursor:
        """The cursor whose `state()` this was."""
        return cls(**state)

    @staticmethod
    def is_of_streams(state: dict[str, Any]) -> bool:
        """Whether a state has positions in streams, of which each rank has saved a part."""
        stream = state.get("stream") or {}
        places = [stream, *(each["stream"] or {} for each in stream.get("sources", {}).values())]
        return any("lanes" in place or "place" in place for place in places)

    @classmethod
    def merged(cls, states: Sequence[dict[str, Any]]) -> Cursor:
        """The position of a run from the states of all data-parallel ranks."""
        streams = [state["stream"] for state in states]
        stream = streams[0]
        if stream is not None and "sources" not in stream:
            stream = merged(streams)
        elif stream is not None:
            stream = {
                "sources": {
                    label: {
                        **place,
                        "stream": merged([e["sources"][label]["stream"] for e in streams]),
                    }
                    if place["stream"]
                    else place
                    for label, place in stream["sources"].items()
                }
            }
        return cls(states[0]["sequences"], stream)


def make_batch(
    rows: Sequence[np.ndarray], boundary: int | None, max_documents: int | None = None
) -> Batch:
    """Microbatch of B rows of S + 1 tokens. With `boundary`, no document sees or predicts its
    neighbour's tokens.

    The boundary token belongs to the document that it ends: it is predicted but predicts nothing.
    PADDING belongs to the last document and is not predicted. `max_documents`: D, no fewer than a
    row has; None: the most that one has, so that shapes differ between batches.
    """
    rows_BS1 = np.stack(rows)
    tokens_BS = rows_BS1[:, :-1]
    labels_BS = rows_BS1[:, 1:]
    if boundary is None:
        steps_BS = np.broadcast_to(np.arange(tokens_BS.shape[1]), tokens_BS.shape)
        return Batch(_tensor(tokens_BS), _tensor(labels_BS), _tensor(steps_BS), ends_BD=None)
    return _apart(rows_BS1, tokens_BS == boundary, boundary, max_documents=max_documents)


def make_marked_batch(
    rows: Sequence[np.ndarray], boundary: int | None, max_documents: int | None = None
) -> Batch:
    """`make_batch` of tokens of conversations: those that are not trained are not predicted."""
    found_BS1 = np.stack(rows)
    rows_BS1 = ids_of_marked(found_BS1)
    if boundary is None:
        batch = make_batch([*rows_BS1], None)
    else:
        ends_BS = ends(found_BS1[:, :-1], boundary)
        batch = _apart(rows_BS1, ends_BS, boundary, max_documents=max_documents)
    untrained_BS = torch.from_numpy(~trained(found_BS1[:, 1:]))
    return replace(batch, labels_BS=batch.labels_BS.masked_fill(untrained_BS, IGNORED))


def _apart(
    rows_BS1: np.ndarray, ends_BS: np.ndarray, boundary: int, max_documents: int | None
) -> Batch:
    """Microbatch of documents that are kept apart and end at these places."""
    tokens_BS, labels_BS = rows_BS1[:, :-1], rows_BS1[:, 1:]
    steps_BS = np.broadcast_to(np.arange(tokens_BS.shape[1]), tokens_BS.shape)
    begins_BS = np.zeros_like(ends_BS)
    begins_BS[:, 1:] = ends_BS[:, :-1] & (tokens_BS[:, 1:] != PADDING)
    positions_BS = steps_BS - np.maximum.accumulate(np.where(begins_BS, steps_BS, 0), axis=1)
    return Batch(
        _tensor(np.where(tokens_BS == PADDING, boundary, tokens_BS)),
        _tensor(np.where(ends_BS | (labels_BS == PADDING), IGNORED, labels_BS)),
        _tensor(positions_BS),
        ends_BD=torch.from_numpy(_ends(begins_BS, max_documents)),
    )


def _ends(begins_BS: np.ndarray, max_documents: int | None) -> np.ndarray:
    """Where documents end, int32 [B, D], from where all but the first begin."""
    most = int(begins_BS.sum(axis=1).max()) + 1
    if max_documents is not None:
        assert most <= max_documents, "sequences are packed with no more documents"
        most = max_documents
    ends_BD = np.full((len(begins_BS), most), begins_BS.shape[1], np.int32)
    for ends_D, begins_S in zip(ends_BD, begins_BS, strict=True):
        begins = np.flatnonzero(begins_S)
        ends_D[: len(begins)] = begins
    return ends_BD


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int64))


class TrainFeed:
    """Microbatches of one data-parallel rank, step by step.

    Microbatch m of rank r holds the global sequences base + (m·dp + r)·B + j for j < B, where base
    counts what earlier steps used: over all ranks a step covers the same sequences for every dp.
    """

    def __init__(
        self,
        dataset: DataSplit,
        dp_rank: int,
        dp: int,
        micro_batch: int,
        num_microbatches: int,
        cursor: Cursor,
    ) -> None:
        self.dataset = dataset
        self.dp_rank = dp_rank
        self.dp = dp
        self.micro_batch = micro_batch
        self.num_microbatches = num_microbatches
        self._sequences = cursor.sequences
        self._reader: Reader = dataset.sequences.reader(
            dp, micro_batch, cursor.sequences, cursor.stream
        )
        # read, but not given out; with the position before them
        self._ahead: tuple[Cursor, list[Batch]] | None = None
        self._failed: Exception | None = None  # why reading ahead did not succeed

    @property
    def cursor(self) -> Cursor:
        """Position after the steps given out so far."""
        return self._ahead[0] if self._ahead else self._cursor()

    def by_source(self) -> dict[str, dict[str, float]] | None:
        """Tokens and epochs of every source in the steps given out so far; None: there is one."""
        if not isinstance(self._reader, BlendReader):
            return None
        return self._reader.totals(self._sequences)

    def _cursor(self) -> Cursor:
        return Cursor(self._sequences, self._reader.state(self._sequences))

    def look_ahead(self) -> list[Batch]:
        """What `next_step` will give; the cursor stays where it is. Raises what reading raises,
        and then always.
        """
        if self._failed is not None:
            raise self._failed
        if self._ahead is None:
            here = self.cursor
            try:
                self._ahead = (
                    here,
                    [
                        self._microbatch(m * self.dp + self.dp_rank)
                        for m in range(self.num_microbatches)
                    ],
                )
            except Exception as error:
                self._failed = error
                raise
        return self._ahead[1]

    def next_step(self) -> list[Batch]:
        """This rank's microbatches of a step; advances the cursor by the global batch."""
        batches = self.look_ahead()
        self._ahead = None
        self._sequences += self.num_microbatches * self.dp * self.micro_batch
        return batches

    def _microbatch(self, ordinal: int) -> Batch:
        first = self._sequences + ordinal * self.micro_batch
        rows, sources = [], []
        for index in range(first, first + self.micro_batch):
            rows.append(self._reader.sample(index))
            if isinstance(self._reader, BlendReader):
                sources.append(self._reader.source)
        make = make_marked_batch if self.dataset.marked else make_batch
        batch = make(rows, self.dataset.boundary, self.dataset.max_documents)
        return replace(batch, sources_B=torch.tensor(sources)) if sources else batch


class ValidationFeed:
    """The same leading validation sequences at every pass; equally many microbatches per rank.

    A split too small for `eval_batches` microbatches on each rank gives fewer; one too small for a
    single microbatch on each rank is read more than once.
    """

    def __init__(
        self, dataset: DataSplit, dp_rank: int, dp: int, micro_batch: int, eval_batches: int
    ) -> None:
        if not isinstance(dataset.sequences, PackedSequences):
            raise TypeError("validation data is never streamed")
        self.dataset = dataset
        self.dp_rank = dp_rank
        self.dp = dp
        self.micro_batch = micro_batch
        self.num_microbatches = max(
            min(eval_batches, dataset.sequences.per_epoch // (micro_batch * dp)), 1
        )

    def __len__(self) -> int:
        """Microbatches of one pass on this rank."""
        return self.num_microbatches

    def __iter__(self) -> Iterator[Batch]:
        return iter(
            TrainFeed(
                self.dataset,
                self.dp_rank,
                self.dp,
                micro_batch=self.micro_batch,
                num_microbatches=self.num_microbatches,
                cursor=Cursor(),
            ).next_step()
        )
