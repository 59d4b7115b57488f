"""Text to token ids and back: UTF-8 bytes, or any tokenizer of the Hugging Face `tokenizers`
library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from app.errors import ConfigError, nearest

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

BYTES = "bytes"  # data.tokenizer of `ByteTokenizer`
# How published tokenizers write "the document ends here", in the order in which we look.
END_OF_DOCUMENT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
BYTES_END = END_OF_DOCUMENT[0]  # of bytes, where tokens have to have names


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

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; end-of-document markers are left out."""


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

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the bytes; invalid sequences become U+FFFD, ids from 256 on are left out."""
        return bytes(i for i in map(int, ids) if i < 256).decode("utf-8", errors="replace")


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

    @property
    def end(self) -> str:
        """The token that ends a document."""
        return self.backend.id_to_token(self.eod) or ""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer named by `data.tokenizer`: "bytes", or the path of a `tokenizers` JSON file.

    Raises ConfigError when the file is missing or unreadable, or has no token that ends a document.
    """
    return ByteTokenizer() if spec == BYTES else json_tokenizer(Path(spec))


def vocabulary(path: Path) -> dict[str, int]:
    """Token -> id of a `tokenizers` JSON file, with what was added to it. Raises as above."""
    found: dict[str, int] = _backend(path).get_vocab()
    return found


def json_tokenizer(path: Path) -> JsonTokenizer:
    """That of a `tokenizers` JSON file. Raises as above."""
    backend = _backend(path)
    backend.no_truncation()  # a file saved with either set would cut or fill every document
    backend.no_padding()
    return JsonTokenizer(
        backend,
        vocab_size=max(backend.get_vocab().values()) + 1,
        eod=_end_of_document(backend, path),
    )


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


def _end_of_document(backend: Backend, path: Path) -> int:
    for token in END_OF_DOCUMENT:
        if (found := backend.token_to_id(token)) is not None:
            return found
    special = [
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    ]
    raise ConfigError(
        "data.tokenizer",
        path,
        f"no token that ends a document (looked for {', '.join(END_OF_DOCUMENT)}); "
        f"its special tokens: {', '.join(special) or 'none'}",
    )


def _nearest_json(path: Path) -> str | None:
    folder = path if path.is_dir() else path.parent
    names = sorted(file.name for file in folder.glob("*.json"))
    close = nearest(path.name, names) or (names[0] if len(names) == 1 else None)
    return str(folder / close) if close else None
