"""Text to token ids and back: UTF-8 bytes, or any tokenizer of the Hugging Face `tokenizers`
library.

That library takes up to 200 bytes of memory per byte of a text. Long documents are therefore
tokenized in slices, with the ids that the whole text has (`_Slices`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from app.data.faults import character_start
from app.data.special_tokens import (
    earlier_end,
    end_of_document,
    first_earlier_end,
    special_tokens,
    token_name,
)
from app.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

SLICE = 2**18  # bytes of a long document that are tokenized at once
AT_ONCE = 16  # slices side by side
OVERLAP = 2**13  # bytes of a slice that are in the next one too
BYTES = "bytes"  # data.tokenizer of `ByteTokenizer`
BYTES_END = "<|endoftext|>"  # of bytes, where tokens have to have names


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


class Tokenizer(Protocol):
    """What the data layer needs from a tokenizer. Instances pickle, and equal ones pickle to
    equal bytes.
    """

    @property
    def vocab_size(self) -> int:
        """Highest id plus one: the rows an embedding needs."""

    @property
    def eod(self) -> int:
        """Id that ends a document."""

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Ids of `text`, without begin or end markers."""

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]:
        """`encode` of every text; may use several threads."""

    def encode_documents(self, documents: Sequence[bytes]) -> Sequence[Sequence[int] | np.ndarray]:
        """`encode_batch` of texts in UTF-8."""

    def encode_long(self, document: bytes, ids: TokenBuffer) -> None:
        """Add the ids that `encode` gives for a text in UTF-8, without holding much besides."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; end-of-document markers and other special tokens are left out."""

    def token_id(self, token: str) -> int | None:
        """Id of a token by its name; None: there is no such token, or tokens have no names."""

    @property
    def special(self) -> Mapping[str, int]:
        """Name -> id of the special tokens, which `decode` leaves out."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0..255 are the bytes of the UTF-8 text, 256 ends a document."""

    vocab_size: int = 257
    eod: int = 256

    def encode(self, text: str) -> np.ndarray:
        """Bytes of `text`, uint8 [T]; lone surrogates become '?'."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of every text."""
        return [self.encode(text) for text in texts]

    def encode_documents(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """The bytes themselves."""
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def encode_long(self, document: bytes, ids: TokenBuffer) -> None:
        """Add the bytes themselves."""
        for start in range(0, len(document), SLICE * AT_ONCE):
            ids.add(np.frombuffer(document[start : start + SLICE * AT_ONCE], dtype=np.uint8))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the bytes; invalid sequences become U+FFFD, ids from 256 on are left out."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        """None: bytes have no names."""
        return None

    @property
    def special(self) -> Mapping[str, int]:
        """None with a name: the end of a document has one in files only, BYTES_END."""
        return {}


def bytes_as_json() -> str:
    """The tokenizer of bytes as a JSON file of the `tokenizers` library: the same ids of all text
    but that of its marker, which becomes the end of a document.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    # How `ByteLevel` writes bytes: as these characters where they print, else from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    ids = {letter: byte for byte, letter in letters.items()} | {BYTES_END: ByteTokenizer.eod}
    found = Backend(models.BPE(ids, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([BYTES_END])
    return found.to_str()


@dataclass(frozen=True)
class JsonTokenizer:
    """A tokenizer read from the JSON file of the `tokenizers` library."""

    backend: Backend
    vocab_size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the template's special tokens."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of every text, on all cores."""
        return [
            encoding.ids
            for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_documents(self, documents: Sequence[bytes]) -> list[list[int]]:
        """`encode_batch` of texts in UTF-8."""
        return self.encode_batch([document.decode() for document in documents])

    def encode_long(self, document: bytes, ids: TokenBuffer) -> None:
        """Add the ids of a text in UTF-8, found slice by slice; all at once where slices do not fit
        together.
        """
        before = len(ids)
        try:
            for part in _Slices(self.backend, document):
                ids.add(part)
        except _NoFit:
            ids.cut(before)
            ids.add(self.encode_batch([document.decode()])[0])

    @property
    def end(self) -> str:
        """The token that ends a document."""
        return token_name(self.backend, self.eod)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens, and without the one that ends a document, which
        its file need not mark as special.
        """
        kept = [number for number in map(int, ids) if number not in self._left_out]
        return self.backend.decode(kept, skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of a token; None: it is not in the vocabulary."""
        return self.backend.token_to_id(token)

    @property
    def special(self) -> Mapping[str, int]:
        """What the file marks as special, and the end of a document."""
        return special_tokens(self.backend) | {self.end: self.eod}

    @cached_property
    def _left_out(self) -> frozenset[int]:
        """Special ids. The library knows them by names, and misses those that it normalizes."""
        return frozenset(self.special.values())

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: what has been used shall pickle as what has not."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class _NoFit(Exception):
    """A slice begins with other ids than when it was tokenized before."""


class _Slices:
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
            raise _NoFit  # ids are drawn
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
                raise _NoFit
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


def load_tokenizer(spec: str, end: str | None = None) -> Tokenizer:
    """The tokenizer named by `data.tokenizer`: "bytes", or the path of a `tokenizers` JSON file.

    `end`: the token that has ended documents so far, and goes on to, where the vocabulary has it;
    None: the files say it (`app.data.special_tokens`). Raises ConfigError when the file is missing
    or unreadable, or nothing says which token ends a document.
    """
    return ByteTokenizer() if spec == BYTES else json_tokenizer(Path(spec), end)


def vocabulary(path: Path) -> dict[str, int]:
    """Token -> id of a `tokenizers` JSON file, with what was added to it. Raises as above."""
    found: dict[str, int] = _backend(path).get_vocab()
    return found


def json_tokenizer(path: Path, end: str | None = None) -> JsonTokenizer:
    """That of a `tokenizers` JSON file; `end` as above. Raises as above."""
    backend = _backend(path)
    backend.no_truncation()  # a file saved with either set would cut or fill every document
    backend.no_padding()
    kept = None if end is None else backend.token_to_id(end)
    return JsonTokenizer(
        backend,
        vocab_size=max(backend.get_vocab().values()) + 1,
        eod=end_of_document(backend, path) if kept is None else kept,
    )


@dataclass(frozen=True, slots=True)
class EarlierEnd:
    """How versions that did not record it have ended documents with a tokenizer."""

    was: str | None  # None: it has no token that they knew
    stays: str | None  # None: `was` is ordinary, and the files name another token

    @classmethod
    def of(cls, path: Path) -> EarlierEnd:
        """With the `tokenizers` JSON file at `path`. Raises ConfigError."""
        backend = _backend(path)
        return cls(first_earlier_end(backend), earlier_end(backend, path))


def _backend(path: Path) -> Backend:
    from tokenizers import Tokenizer as Backend

    if not path.is_file():
        raise ConfigError(
            "data.tokenizer",
            path,
            "no such file; give 'bytes' or a tokenizers JSON file",
            guess=_nearest_json(path),
        )
    try:
        return Backend.from_file(str(path))
    # the library raises bare Exception for whatever is wrong with the file
    except Exception as error:
        raise ConfigError("data.tokenizer", path, f"not a tokenizers JSON file: {error}") from error


def _nearest_json(path: Path) -> str | None:
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.glob("*.json"))
    close = nearest(path.name, names) or (names[0] if len(names) == 1 else None)
    return str(folder / close) if close else None
