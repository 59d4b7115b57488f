"""Documents read while training: shuffled, tokenized and packed on the fly, resumed exactly.

The shuffle buffer of the `datasets` library is not part of its state, so we shuffle ourselves,
block by block: a block of documents is read, put in an order drawn from (seed, lane, epoch, block),
and used up before the next is read. The state is the library's state at the start of the block, how
many of its documents are used, and the tokens left over from them; resuming reads the block again.
Shards keep their order.

The documents are dealt to lanes, as many as the run has data-parallel ranks when it begins, and
micro_batch sequences are taken from each lane in turn. So each rank reads one lane. A run that is
resumed by other ranks keeps lanes and order: a rank then reads every lane that it needs a sequence
of, and passes over those of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from app.data.marks import ends
from app.data.packing import PADDING
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError

if TYPE_CHECKING:
    from datasets import IterableDataset

SHUFFLE_BLOCK = 1000  # documents
# what the library raises for a state that it cannot load; OSError is of the disk or network
NO_POSITION = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, SystemError)
Encode = Callable[[str], np.ndarray]  # tokens of a document with its end, int64; none of no token


def encoder(tokenizer: Tokenizer, marked: bool) -> Encode:
    """Return what makes tokens of the documents of a stream; `marked`: of conversations."""
    if marked:
        from app.data.chat import marked_documents  # imports jinja2

        return lambda text: marked_documents(tokenizer, [text.encode()])[0].astype(np.int64)

    def encode(text: str) -> np.ndarray:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
        return np.append(ids, tokenizer.eod) if len(ids) else ids

    return encode


@dataclass(frozen=True)
class StreamedSequences:
    """Sequences of `seq_len` + 1 tokens out of a stream of documents."""

    documents: IterableDataset  # one column: the text
    held_out: int  # leading documents that are kept for validation
    encode: Encode
    eod: int  # id that ends a document
    seq_len: int
    seed: int
    max_documents: int | None = None  # of a sequence; None: any number

    def reader(
        self, dp: int, micro_batch: int, sequences: int, state: dict[str, Any] | None
    ) -> StreamReader:
        """Sequences of one rank, from the start or from a state of `StreamReader.state`.

        Raises ConfigError when the state is missing for a run that has already used sequences.
        """
        return StreamReader(self.lanes(dp, micro_batch, sequences, state), sequences)

    def lanes(
        self, dp: int, micro_batch: int, sequences: int, state: dict[str, Any] | None
    ) -> Lanes:
        """The lanes of a new run, or of a state. Raises ConfigError as `reader`."""
        if state is None and sequences:
            raise ConfigError(
                "data.streaming",
                True,
                f"the saved position ({sequences} sequences) is not a stream's",
                nearest=False,
            )
        if state is None:
            state = {"block": None, "due": [0] * dp, "lanes": [None] * dp}
        block = state["block"] or micro_batch
        return Lanes(self._lane, block, state["due"], lanes=state["lanes"])

    def _lane(self, number: int, count: int, state: dict[str, Any] | None) -> Lane:
        """One of `count` lanes."""
        from datasets.distributed import split_dataset_by_node

        own = split_dataset_by_node(self.documents, rank=number, world_size=count)
        place = StreamPosition() if state is None else StreamPosition(**state["place"])
        return Lane(
            _Shuffled(own, self.held_out, (self.seed, number), place=place),
            self.encode,
            self.eod,
            seq_len=self.seq_len,
            leftover=[] if state is None else state["leftover"],
            max_documents=self.max_documents,
            used=0 if state is None else state["used"],
        )


@dataclass(frozen=True)
class StreamPosition:
    """A position in the shuffled documents of one lane."""

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
        # Skipping after the split skips in every lane. A lane keeps the stream's order, so
        # whatever it has of the leading documents leads there too, and is skipped whichever way the
        # shards fall.
        self.documents = documents.skip(held_out)
        self.held_out = held_out
        self.seed = seed
        self.place = place
        try:
            self._rows = self._open()
            self._block = self._read_block()
            if place.used > len(self._block):
                raise IndexError(f"used={place.used} of {len(self._block)} documents")
        except ConfigError:
            raise
        except NO_POSITION as error:
            if place == StreamPosition():  # a fault of the data
                raise
            rule = f"the saved position is none in these data: {error!r}"
            advice = "restore the data, or begin a new run"
            raise ConfigError("data.streaming", True, rule, advice=advice) from error

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
            rule = f"leaves rank {self.seed[1]} no document to train on"
            raise ConfigError(
                "data.validation_documents", self.held_out, rule, advice="hold out fewer"
            )
        self._block = self._read_block()


class Lane:
    """Packed sequences of one lane; neighbours share one token, so that each is predicted once. A
    sequence that would have more than `max_documents` ends with its last document.
    """

    def __init__(
        self,
        texts: _Shuffled,
        encode: Encode,
        eod: int,
        seq_len: int,
        leftover: list[int],
        max_documents: int | None,
        used: int,
    ) -> None:
        self.texts = texts
        self.encode = encode
        self.eod = eod
        self.seq_len = seq_len
        self.used = used  # sequences so far
        self.max_documents = max_documents
        self._leftover_T = np.array(leftover, dtype=np.int64)

    def __next__(self) -> np.ndarray:
        """The next sequence, PADDING at the end of a short one: int64 [S + 1]."""
        self.used += 1
        parts = [self._leftover_T]
        size = len(self._leftover_T)
        while size < self.seq_len + 1:
            parts.append(self.encode(next(self.texts)))
            size += len(parts[-1])
        tokens_T = np.concatenate(parts) if len(parts) > 1 else self._leftover_T
        if self.max_documents is not None:
            last = np.flatnonzero(ends(tokens_T[: self.seq_len - 1], self.eod)) + 1
            if len(last) >= self.max_documents:
                stop = int(last[self.max_documents - 1])
                self._leftover_T = tokens_T[stop:]
                row = np.full(self.seq_len + 1, PADDING, np.int64)
                row[:stop] = tokens_T[:stop]
                return row
        self._leftover_T = tokens_T[self.seq_len :]
        return tokens_T[: self.seq_len + 1]

    def state(self) -> dict[str, Any]:
        """State needed to resume from here: numbers, strings, lists and dictionaries."""
        place, leftover = asdict(self.texts.place), self._leftover_T.tolist()
        return {"used": self.used, "place": place, "leftover": leftover}


class Lanes:
    """Sequences of all lanes. Every rank counts all sequences, and opens the lanes that it reads.

    `lanes` are their states; None: not read yet, as far as is known here.
    """

    def __init__(
        self,
        opened: Callable[[int, int, dict[str, Any] | None], Lane],
        block: int,
        due: Sequence[int],
        lanes: Sequence[dict[str, Any] | None],
    ) -> None:
        self.block = block  # sequences that are taken from a lane in turn
        self.due = list(due)  # sequences of each lane that were counted
        self._saved = lanes
        self._opener = opened
        self._open: dict[int, Lane] = {}

    def count(self, index: int) -> int:
        """Count sequence `index` of a run, which is another rank's; return its lane."""
        lane = index // self.block % len(self.due)
        self.due[lane] += 1
        return lane

    def read(self, index: int) -> np.ndarray:
        """Count sequence `index` of a run; return its tokens as `Lane` does."""
        number = self.count(index)
        if number not in self._open:
            saved = self._saved[number]
            self._open[number] = self._opener(number, len(self.due), saved)
        self._catch_up(number, self.due[number] - 1)
        return next(self._open[number])

    def _catch_up(self, number: int, due: int) -> None:
        while self._open[number].used < due:
            next(self._open[number])

    def state(self) -> dict[str, Any]:
        """Position behind the counted sequences, of lanes that others read too old: `merged`."""
        for number in self._open:
            self._catch_up(number, self.due[number])
        found = [self._open.get(number) for number in range(len(self.due))]
        lanes = [
            saved if lane is None else lane.state()
            for lane, saved in zip(found, self._saved, strict=True)
        ]
        return {"block": self.block, "due": list(self.due), "lanes": lanes}


class StreamReader:
    """Sequences of one rank in a run of one stream."""

    def __init__(self, lanes: Lanes, first: int) -> None:
        self.lanes = lanes
        self.next = first  # the global sequence that is counted next

    def sample(self, index: int) -> np.ndarray:
        """Tokens of a global sequence; indices rise."""
        self._go_to(index)
        self.next += 1
        return self.lanes.read(index)

    def state(self, sequences: int) -> dict[str, Any]:
        """Position behind so many global sequences, no fewer than were read."""
        self._go_to(sequences)
        return self.lanes.state()

    def _go_to(self, index: int) -> None:
        for passed in range(self.next, index):
            self.lanes.count(passed)
        self.next = max(self.next, index)


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of all lanes from those that all data-parallel ranks have saved together."""
    if "place" in states[0]:  # of an earlier version, in which every rank had a part of its own
        old = sorted(states, key=lambda each: each["dp_rank"])
        lanes = [{"used": 0, "place": e["place"], "leftover": e["leftover"]} for e in old]
        return {"block": None, "due": [0] * len(lanes), "lanes": lanes}
    saved = zip(*(state["lanes"] for state in states), strict=True)
    lanes = [max(lane, key=lambda each: each["used"] if each else -1) for lane in saved]
    return {**states[0], "lanes": lanes}
