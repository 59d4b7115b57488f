"""Token ids of long texts, found slice by slice, and the memory that they are collected in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from app.data.faults import character_start

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

SLICE = 2**18  # bytes of a long document that are tokenized at once
AT_ONCE = 16  # slices side by side
OVERLAP = 2**13  # bytes of a slice that are in the next one too


class TokenBuffer:
    """Ids of one type in memory that grows in place."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self._content = bytearray()

    def __len__(self) -> int:
        return len(self._content) // self.dtype.itemsize

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append ids."""
        self._content += np.ascontiguousarray(ids, dtype=self.dtype).data.cast("B")

    def cut(self, length: int) -> None:
        """Keep so many ids."""
        del self._content[length * self.dtype.itemsize :]

    def ids(self) -> np.ndarray:
        """All ids, a view: nothing can be added while it is there."""
        return np.frombuffer(self._content, dtype=self.dtype)


class NoFit(Exception):
    """A slice begins with other ids than when it was tokenized before."""


class Slices:
    """Ids of a long text, from slices that overlap; they are those of the whole text.

    Tokenizers go through a text from its beginning and look a little ahead. So two tokenizations
    that have the same tokens on both sides of a place are the same from there on, however far apart
    they began, and those of the left one up to there do not depend on where it ended. We let each
    slice reach OVERLAP bytes into the next, and tokenize what both share once more by itself, which
    says how many of its tokens stand before and behind any place in it. In its middle half all
    three must agree, and there we go from one slice to the next: between two words, as the
    tokenizer splits them, because models look at one word at a time. Within a word, where there is
    no other place, only BPE may be cut: its ids are right when each neighbouring pair is (so does
    https://github.com/github/rust-gems/tree/main/crates/bpe), and both slices have this pair.
    Slices that do not agree, as within long runs of one letter, are tokenized as one of twice the
    length, at the worst the whole text.
    """

    def __init__(self, backend: Backend, text: bytes) -> None:
        self.backend = backend
        self.text = text
        model = backend.model
        self._bpe = type(model).__name__ == "BPE"
        if self._bpe and model.dropout:
            raise NoFit  # ids are drawn
        # An id of known pieces stands for one string, so that equal ids are at equal places. The id
        # for all that is unknown does not: then places are compared too, in twice the time.
        self._places = not self._bpe or (model.unk_token is not None and not model.byte_fallback)

    def __iter__(self) -> Iterator[np.ndarray]:
        start, used, size = 0, 0, SLICE
        known = np.empty(0, np.int64)  # first ids of the slice at `start`
        while True:
            starts, ends = self._cuts(start, size)
            slices = self._encoded(starts, ends, self._places)
            windows = self._encoded(starts[1:], ends[:-1], True)
            if not np.array_equal(slices[0].ids[: len(known)], known):
                raise NoFit
            fits = True
            for number, window in enumerate(windows):
                cut = self._cut(slices[number], window, slices[number + 1])
                if cut is None:
                    fits = False
                    break
                yield slices[number].ids[used : len(slices[number].ids) - len(window.ids) + cut]
                start, used, known = starts[number + 1], cut, window.ids[: cut + 1]
                size = SLICE
            if fits and ends[-1] == len(self.text):
                yield slices[-1].ids[used:]
                return
            if not fits:
                size *= 2

    def _cuts(self, start: int, size: int) -> tuple[list[int], list[int]]:
        """Where the next slices begin and end; there are two at least, or one to the end."""
        starts, ends = [start], []
        for _ in range(max(1, AT_ONCE * SLICE // size)):
            following = starts[-1] + size
            if following + OVERLAP >= len(self.text):
                break
            starts.append(character_start(self.text, following))
            ends.append(character_start(self.text, following + OVERLAP))
        else:
            ends.append(character_start(self.text, starts[-1] + SLICE + OVERLAP))
            return starts, ends
        return starts, [*ends, len(self.text)]

    def _encoded(self, starts: list[int], ends: list[int], places: bool) -> list[_Slice]:
        texts = [self.text[a:b].decode() for a, b in zip(starts, ends, strict=True)]
        encode = self.backend.encode_batch if places else self.backend.encode_batch_fast
        found = encode(texts, add_special_tokens=False)
        return [
            _Slice(len(text), np.asarray(each.ids, np.int64), each)
            for text, each in zip(texts, found, strict=True)
        ]

    def _cut(self, left: _Slice, window: _Slice, right: _Slice) -> int | None:
        """How many tokens of a window come from the left slice, None where slices do not agree."""
        count = len(window.ids)
        low, high = count // 4, count - count // 4
        if high - low < 2 or min(len(left.ids), len(right.ids)) < count:
            return None
        behind = len(left.ids) - count  # tokens of the left slice before the window's
        agreed = np.array_equal(left.ids[behind + low :], window.ids[low:])
        if not agreed or not np.array_equal(right.ids[:high], window.ids[:high]):
            return None
        if self._places and not (
            left.places(behind + low, behind + count, left.length - window.length)
            == window.places(low, count, 0)
            and right.places(0, high, 0) == window.places(0, high, 0)
        ):
            return None
        middle = count // 2
        words = [window.encoding.token_to_word(at) for at in range(low, high)]
        ends = [low + at for at in range(1, len(words)) if words[at - 1] != words[at]]
        if ends:
            return min(ends, key=lambda at: abs(at - middle))
        return middle if self._bpe else None


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a text, tokenized."""

    length: int  # characters
    ids: np.ndarray
    encoding: Encoding

    def places(self, first: int, last: int, shift: int) -> list[tuple[int, int]]:
        """Where tokens begin and end, in characters from `shift` on."""
        found = (self.encoding.token_to_chars(at) for at in range(first, last))
        return [(begin - shift, end - shift) for begin, end in filter(None, found)]
