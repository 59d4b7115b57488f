"""Size of a vocabulary that is left to the run's tokenizer."""

from __future__ import annotations

import re

from omegaconf import DictConfig

from app.data.tokenizer import ids_of
from app.data.tokenizer_files import bring_tokenizer

OF_TOKENIZER = re.compile(r"\$\{ids_of_tokenizer:(\d+)\}")  # and what its size is a multiple of


def ids_of_tokenizer(multiple: int, _root_: DictConfig) -> int:
    """Resolve `${ids_of_tokenizer:8}` where a composed configuration is shown."""
    return _padded(_root_.data.tokenizer, multiple, asks=True)


def fill_in_vocabulary(config: DictConfig, asks: bool) -> None:
    """Set model.vocab_size if a composed configuration leaves it to the tokenizer.

    `asks`: as `bring_tokenizer`. Raises ConfigError.
    """
    node = config.model._get_node("vocab_size")
    if (left := OF_TOKENIZER.fullmatch(str(node._value()))) is not None:
        multiple = int(left.group(1))
        config.model.vocab_size = _padded(config.data.tokenizer, multiple, asks=asks)


def _padded(spec: str, multiple: int, *, asks: bool) -> int:
    """Return the tokenizer's ids up to a multiple. Raises ConfigError."""
    bring_tokenizer(spec, asks)
    return -(-ids_of(spec) // multiple) * multiple
