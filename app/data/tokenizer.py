"""Text to token ids and back: UTF-8 bytes, or any tokenizer of the Hugging Face `tokenizers`
library.

That library takes up to 200 bytes of memory per byte of a text. Long documents are therefore
tokenized in slices, with the ids that the whole text has (`app.data.slices`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from app.data.slices import NoFit, Slices, TokenBuffer
from app.data.special_tokens import (
    earlier_end,
    end_of_document,
    first_earlier_end,
    special_tokens,
    token_name,
)
from app.data.tokenizer_files import tokenizer_file
from app.errors import ConfigError
from app.own_files import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTES_AT_ONCE = 2**22  # of a long document
BYTES = "bytes"  # data.tokenizer of `ByteTokenizer`
BYTES_TURN = "\x03"  # ends a turn of conversations in bytes
BYTES_END = "<|endoftext|>"  # of bytes, where tokens have to have names


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
        for start in range(0, len(document), BYTES_AT_ONCE):
            ids.add(np.frombuffer(document[start : start + BYTES_AT_ONCE], dtype=np.uint8))

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
            for part in Slices(self.backend, document):
                ids.add(part)
        except NoFit:
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


def load_tokenizer(spec: str, end: str | None = None) -> Tokenizer:
    """The tokenizer named by `data.tokenizer`: "bytes", or what `tokenizer_file` finds.

    `end`: the token that has ended documents so far; still used if the vocabulary has it;
    None: the files say it (`app.data.special_tokens`). Raises ConfigError when the file is missing
    or unreadable, or nothing says which token ends a document.
    """
    return ByteTokenizer() if spec == BYTES else json_tokenizer(tokenizer_file(spec), end)


def ids_of(spec: str) -> int:
    """Return the number of ids of the tokenizer that `data.tokenizer` names. Raises as above."""
    if spec == BYTES:
        return ByteTokenizer.vocab_size
    return max(vocabulary(tokenizer_file(spec)).values()) + 1


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

    try:
        found = Backend.from_buffer(read_regular(path))
    # the library raises bare Exception for whatever is wrong with the file
    except Exception as error:
        raise ConfigError("data.tokenizer", path, f"not a tokenizers JSON file: {error}") from error
    if not found.get_vocab_size():
        raise ConfigError("data.tokenizer", path, "has no tokens")
    return found
