"""Find a model's special tokens in its files: those that end generation, and the prefix token."""

from __future__ import annotations

from pathlib import Path

from app.data.special_tokens import KEY, SETTINGS, model_ids, named_token
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError


def generation_ends(texts: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that end a generated text.

    They are the end-of-document token, `eos_token_id` (one or several) of the generation config in
    the folder `texts`, else of config.json, and `eos_token` of the tokenizer's settings there.
    Raises ConfigError.
    """
    named = named_token(texts, "eos_token")
    told = None if named is None else tokenizer.token_id(named)
    ends = {tokenizer.eod, *model_ids(texts, "eos_token_id")}
    return frozenset(ends if told is None else {*ends, told})


def prefix_token(texts: Path, tokenizer: Tokenizer) -> int:
    """Return the id put before a text without a prompt, as lm-evaluation-harness chooses it.

    It is `bos_token` of the tokenizer's settings in the folder `texts`; without settings the
    model's `bos_token_id` if that is a special token; else the end-of-document token, which
    precedes documents in our training. Raises ConfigError.
    """
    named = named_token(texts, "bos_token")
    if named is not None:
        if (found := tokenizer.token_id(named)) is None:
            rule = f"{SETTINGS}: bos_token={named!r} is not in the vocabulary of the tokenizer"
            raise ConfigError(KEY, texts, rule)
        return found
    if not (texts / SETTINGS).is_file():
        special = set(tokenizer.special.values())
        for number in model_ids(texts, "bos_token_id"):
            if number in special:
                return number
    return tokenizer.eod
