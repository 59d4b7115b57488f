"""Documents read while training: shuffled, tokenized and packed on the fly, resumed exactly.

The shuffle buffer of the `datasets` library is not part of its state, so we shuffle ourselves,
block by block: a block of documents is read, put in an order drawn from (seed, rank, epoch, block),
and used up before the next is read. The state is the library's state at the start of the block, how
many of its documents are used, and the tokens left over from them; resuming reads the block again.
Shards keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.packing import PADDING
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset

SHUFFLE_BLOCK = 1000  # documents


@dataclass(frozen=True)
class StreamedSequences:
    """Sequences of `seq_len` + 1 tokens out of a stream of documents; every data-parallel rank
    has its own part.
    """

    documents: IterableDataset  # one column: the text
    held_out: int  # leading documents that are kept for validation
    tokenizer: Tokenizer
    seq_len: int
    seed: int
    max_documents: int | None = None  # of a sequence; None: any number

    def reader(
        self, dp_rank: int, dp: int, sequences: int, state: dict[str, Any] | None
    ) -> StreamReader:
        """Sequences of one rank, from the start or from a state that `StreamReader.state` gave at
        the same dp.

        Raises ConfigError when the state is of another dp or missing for a run that has already
        used sequences.
        """
        from datasets.distributed import split_dataset_by_node

        if state is None and sequences:
            raise ConfigError(
                "data.streaming",
                True,
                f"the saved position ({sequences} sequences) is not a stream's",
                nearest=False,
            )
        if state is not None and (state["dp"], state["dp_rank"]) != (dp, dp_rank):
            saved = f"rank {state['dp_rank']} of {state['dp']}"
            raise ConfigError(
                "parallel.dp",
                dp,
                f"rank {dp_rank} cannot continue the stream of {saved}",
                nearest=state["dp"],
            )
        own = split_dataset_by_node(self.documents, rank=dp_rank, world_size=dp)
        place = StreamPosition() if state is None else StreamPosition(**state["place"])
        leftover = [] if state is None else state["leftover"]
        texts = _Shuffled(own, self.held_out, (self.seed, dp_rank), place=place)
        return StreamReader(
            texts,
            self.tokenizer,
            self.seq_len,
            rank=(dp_rank, dp),
            leftover=leftover,
            max_documents=self.max_documents,
        )


@dataclass(frozen=True)
class StreamPosition:
    """A position in the shuffled documents of one rank."""

    epoch: int = 0
    block: int = 0  # within the epoch
    used: int = 0  # documents of the block
    # the library's state before the block; None: the epoch's start
    source: dict[str, Any] | None = None


class _Shuffled:
    """Endless non-empty texts of a stream, shuffled block by block; `place` says where the next
    one is.
    """

    def __init__(
        self,
        documents: IterableDataset,
        held_out: int,
        seed: tuple[int, ...],
        place: StreamPosition,
    ) -> None:
        # Skipping after the split skips on every rank. A rank's part keeps the stream's order, so
        # whatever it has of the leading documents leads there too, and is skipped whichever way the
        # shards fall.
        self.documents = documents.skip(held_out)
        self.held_out = held_out
        self.seed = seed
        self.place = place
        self._rows = self._open()
        self._block = self._read_block()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while self.place.used == len(self._block):
            self._advance()
        text = self._block[self.place.used]
        self.place = replace(self.place, used=self.place.used + 1)
        return text

    def _open(self) -> Iterator[str]:
        # also makes the library forget a state loaded for an earlier epoch
        self.documents.set_epoch(self.place.epoch)
        if self.place.source is not None:
            self.documents.load_state_dict(self.place.source)
        return (text for row in self.documents for text in row.values() if text)

    def _read_block(self) -> list[str]:
        texts = list(islice(self._rows, SHUFFLE_BLOCK))
        order = np.random.default_rng([*self.seed, self.place.epoch, self.place.block]).permutation(
            len(texts)
        )
        return [texts[i] for i in order]

    def _advance(self) -> None:
        """Read the next block, the first of another epoch when the stream has ended."""
        if self._block:
            self.place = StreamPosition(
                self.place.epoch, self.place.block + 1, 0, source=self.documents.state_dict()
            )
        elif self.place.block:
            self.place = StreamPosition(self.place.epoch + 1)
            self._rows = self._open()
        else:
            rule = f"leaves dp_rank={self.seed[1]} no document to train on"
            raise ConfigError(
                "data.validation_documents", self.held_out, rule, advice="hold out fewer"
            )
        self._block = self._read_block()


class StreamReader:
    """Packed sequences of one rank's stream; neighbours share one token, so that each is
    predicted once. A sequence that would have more than `max_documents` ends with its last
    document.
    """

    def __init__(
        self,
        texts: _Shuffled,
        tokenizer: Tokenizer,
        seq_len: int,
        rank: tuple[int, int],
        leftover: list[int],
        max_documents: int | None = None,
    ) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.rank = rank
        self.max_documents = max_documents
        self._leftover_T = np.array(leftover, dtype=np.int64)

    def sample(self, _index: int) -> np.ndarray:
        """The next sequence, PADDING at the end of a short one: int64 [S + 1]. A stream does not
        seek, so the index is not looked at.
        """
        parts = [self._leftover_T]
        size = len(self._leftover_T)
        while size < self.seq_len + 1:
            ids = self.tokenizer.encode(next(self.texts))
            if len(ids):
                parts += [np.asarray(ids, dtype=np.int64), np.array([self.tokenizer.eod])]
            size += len(ids) + 1 if len(ids) else 0
        tokens_T = np.concatenate(parts) if len(parts) > 1 else self._leftover_T
        if self.max_documents is not None:
            ends = np.flatnonzero(tokens_T[: self.seq_len - 1] == self.tokenizer.eod) + 1
            if len(ends) >= self.max_documents:
                stop = int(ends[self.max_documents - 1])
                self._leftover_T = tokens_T[stop:]
                row = np.full(self.seq_len + 1, PADDING, np.int64)
                row[:stop] = tokens_T[:stop]
                return row
        self._leftover_T = tokens_T[self.seq_len :]
        return tokens_T[: self.seq_len + 1]

    def state(self, _sequences: int) -> dict[str, Any]:
        """State needed to resume from here: numbers, strings, lists and dictionaries."""
        dp_rank, dp = self.rank
        return {
            "dp_rank": dp_rank,
            "dp": dp,
            "place": asdict(self.texts.place),
            "leftover": self._leftover_T.tolist(),
        }
