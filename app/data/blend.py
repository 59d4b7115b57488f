"""Sequences of several sources in shares of their weights.

Which source the next global sequence is from depends on the weights alone: after any number of
sequences, the count of a source is within one of its share (Tijdeman 1980, "The chairman assignment
problem"). So any rank finds its sequences without asking another one, and a position is a few
integers per source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.data.packing import PackedSequences
from app.data.stream import Lanes, StreamedSequences
from app.errors import ConfigError

KEY = "data.sources"
UNITS = 2**32  # a weight is rounded to a multiple of the largest one's UNITS-th part


@dataclass(frozen=True, slots=True)
class BlendPart:
    """A source of a blend."""

    label: str
    weight: float  # of its tokens, relative to those of the others
    repeats: bool  # starts anew when it is used up; otherwise it is left out from then on
    sequences: PackedSequences | StreamedSequences

    @property
    def per_epoch(self) -> int | None:
        """Sequences of the first epoch; None: not known, as of a stream."""
        return self.sequences.per_epoch if isinstance(self.sequences, PackedSequences) else None

    @property
    def padding(self) -> float:
        """Share of positions without a token."""
        return self.sequences.padding if isinstance(self.sequences, PackedSequences) else 0.0


@dataclass(frozen=True)
class BlendedSequences:
    """Sequences of several sources; every source keeps its own order."""

    parts: tuple[BlendPart, ...]

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence that are predicted."""
        return self.parts[0].sequences.seq_len

    def reader(
        self, dp: int, micro_batch: int, sequences: int, state: dict[str, Any] | None
    ) -> BlendReader:
        """Sequences of one rank, from the start or from a state of `BlendReader.state`.

        Sources are recognised by their labels: one that is new begins, one that is missing is left
        out, and other weights count from there on. Raises ConfigError for the state of other data.
        """
        if (state is None and sequences) or (state is not None and "sources" not in state):
            rule = "the saved position is not that of several sources"
            raise ConfigError(KEY, [part.label for part in self.parts], rule, nearest="[]")
        saved = {} if state is None else state["sources"]
        found = [
            _Place.of(number, part, saved.get(part.label)) for number, part in enumerate(self.parts)
        ]
        readers = [
            part.sequences.lanes(dp, micro_batch, place.used, place.stream)
            if isinstance(part.sequences, StreamedSequences)
            else part.sequences.reader(dp, micro_batch, place.used, place.stream)
            for part, place in zip(self.parts, found, strict=True)
        ]
        same = {label: each["rate"] for label, each in saved.items() if not each["ended"]}
        walk = Walk(found, _rates(self.parts), sequences)
        if walk.rates_by_label() == same:
            walk.credits = [saved[place.label]["credit"] for place in walk.running]
        return BlendReader(self.parts, readers, walk)

    @property
    def limit(self) -> int | None:
        """Sequences until all sources are used up; None: never."""
        found = [None if part.repeats else part.per_epoch for part in self.parts]
        known = [count for count in found if count is not None]
        return sum(known) if len(known) == len(found) else None

    @property
    def padding(self) -> float:
        """Share of positions without a token while no source is used up."""
        return self._mean([part.padding for part in self.parts])

    def padding_with(self, max_documents: int) -> float:
        """Share of padding with another `max_documents`."""
        found = (part.sequences for part in self.parts)
        return self._mean(
            [
                each.padding_with(max_documents) if isinstance(each, PackedSequences) else 0.0
                for each in found
            ]
        )

    def _mean(self, paddings: Sequence[float]) -> float:
        """Padding of all from that of each source: weights are of tokens."""
        tokens = sum(part.weight for part in self.parts)
        pairs = zip(self.parts, paddings, strict=True)
        return 1 - tokens / sum(part.weight / (1 - padding) for part, padding in pairs)

    @property
    def documents(self) -> int:
        """Documents of all sources, without streams."""
        found = (part.sequences for part in self.parts)
        return sum(each.documents for each in found if isinstance(each, PackedSequences))


def _rates(parts: Sequence[BlendPart]) -> list[int]:
    """Return sequences per source in proportion: weights are of tokens, without padding."""
    weights = [part.weight / (1 - part.padding) for part in parts]
    return [max(1, round(weight / max(weights) * UNITS)) for weight in weights]


@dataclass(slots=True)
class _Place:
    """Position of a source."""

    number: int  # of the source
    label: str
    used: int  # sequences so far
    most: int | None  # sequences after which it is used up; None: never
    stream: dict[str, Any] | None  # state of its reader
    rate: int = 0

    @classmethod
    def of(cls, number: int, part: BlendPart, saved: dict[str, Any] | None) -> _Place:
        """Return the saved position of a source, or its start."""
        most = None if part.repeats else part.per_epoch
        if saved is None:
            return cls(number, part.label, 0, most, None)
        return cls(number, part.label, saved["used"], most, saved["stream"])

    @property
    def ended(self) -> bool:
        """True if nothing of it is left."""
        return self.most is not None and self.used >= self.most


class Walk:
    """Assignment of a source to every global sequence, one after another.

    credits: for every source that is left, its rate times the sequences since the walk began, minus
    those that it got times the sum of rates: an integer, so that no rounding adds up.
    """

    def __init__(self, places: Sequence[_Place], rates: Sequence[int], first: int) -> None:
        self.places = places
        self.next = first  # the global sequence that is assigned next
        for place, rate in zip(places, rates, strict=True):
            place.rate = rate
        self._begin()

    def _begin(self) -> None:
        """Begin with the sources that are left; each is as near to its share as any other."""
        self.running = [place for place in self.places if not place.ended]
        self.total = sum(place.rate for place in self.running)
        self.credits = [0] * len(self.running)

    def rates_by_label(self) -> dict[str, int]:
        """Return the rates of the sources that are left."""
        return {place.label: place.rate for place in self.running}

    def advance(self) -> tuple[int, int]:
        """Assign the next sequence; return its source and its number within that.

        Among the sources that are at least 1/(2k − 2) behind their share, of k, the one that would
        first be too far behind gets it. Raises ConfigError when all sources are used up.
        """
        if not self.running:
            rule = f"all stop when they are used up, and are after {self.next} sequences"
            labels = [place.label for place in self.places]
            raise ConfigError(KEY, labels, rule, advice="let one repeat")
        for number, place in enumerate(self.running):
            self.credits[number] += place.rate
        chosen = self._most_urgent()
        place = self.running[chosen]
        self.credits[chosen] -= self.total
        found = place.number, place.used
        place.used += 1
        self.next += 1
        if place.ended:
            self._begin()
        return found

    def _most_urgent(self) -> int:
        scale = max(1, 2 * len(self.running) - 2)
        best = -1
        ahead = 0  # of the best one: (scale − 1)·total − scale·credit
        for number, (place, credit) in enumerate(zip(self.running, self.credits, strict=True)):
            if scale * credit < self.total:
                continue
            own = (scale - 1) * self.total - scale * credit
            # own / rate < ahead / rate of the best one, in integers
            if best < 0 or own * self.running[best].rate < ahead * place.rate:
                best, ahead = number, own
        assert best >= 0, "credits add up to the sum of rates, so one source is behind"
        return best


class BlendReader:
    """Sequences of one rank in a blend."""

    def __init__(
        self, parts: Sequence[BlendPart], readers: Sequence[PackedSequences | Lanes], walk: Walk
    ) -> None:
        self.parts = parts
        self.readers = readers
        self.walk = walk
        self.source = 0  # of the sequence that was read last, its place among the parts

    def sample(self, index: int) -> np.ndarray:
        """Tokens of a global sequence; indices rise."""
        assert index >= self.walk.next, "sequences are read in order"
        self._go_to(index)
        self.source, number = self.walk.advance()
        reader = self.readers[self.source]
        return reader.read(index) if isinstance(reader, Lanes) else reader.sample(number)

    def state(self, sequences: int) -> dict[str, Any]:
        """Position after so many global sequences, no fewer than were read."""
        self._go_to(sequences)
        labels = [place.label for place in self.walk.running]
        credits = dict(zip(labels, self.walk.credits, strict=True))
        return {
            "sources": {
                place.label: {
                    "used": place.used,
                    "rate": place.rate,
                    "credit": credits.get(place.label, 0),
                    "ended": place.ended,
                    "stream": reader.state() if isinstance(reader, Lanes) else None,
                }
                for place, reader in zip(self.walk.places, self.readers, strict=True)
            }
        }

    def totals(self, sequences: int) -> dict[str, dict[str, float]]:
        """Tokens and epochs of every source, by its label, after so many global sequences: epochs
        of the length of the first one, none of a stream, whose length is not known.
        """
        self._go_to(sequences)
        tokens: dict[str, float] = {}
        epochs: dict[str, float] = {}
        for part, place in zip(self.parts, self.walk.places, strict=True):
            tokens[part.label] = round(place.used * part.sequences.seq_len * (1 - part.padding))
            if part.per_epoch is not None:
                epochs[part.label] = place.used / part.per_epoch
        return {"tokens": tokens, "epochs": epochs}

    def _go_to(self, sequences: int) -> None:
        while (index := self.walk.next) < sequences:
            source, _ = self.walk.advance()
            if isinstance(reader := self.readers[source], Lanes):
                reader.count(index)
