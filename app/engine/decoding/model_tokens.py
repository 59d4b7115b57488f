"""Tokens that a model gives a meaning, by the files that came with it: which ones end generation,
and which one stands in front of a text.
"""

from __future__ import annotations

from pathlib import Path

from app.data.special_tokens import KEY, SETTINGS, model_ids, named_token
from app.data.tokenizer import Tokenizer
from app.errors import ConfigError


def generation_ends(texts: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a generated text: the end of a document, `eos_token_id` of the generation config
    (else of config.json) in the folder `texts`, one or several, and `eos_token` of the tokenizer's
    settings there. Raises ConfigError.
    """
    named = named_token(texts, "eos_token")
    told = None if named is None else tokenizer.token_id(named)
    ends = {tokenizer.eod, *model_ids(texts, "eos_token_id")}
    return frozenset(ends if told is None else {*ends, told})


def prefix_token(texts: Path, tokenizer: Tokenizer) -> int:
    """Id given in front of a text that follows nothing, as lm-evaluation-harness chooses it:
    `bos_token` of the settings in the folder `texts`, else the end of a document, which is what
    documents of our runs follow. Without settings a special `bos_token_id` of the model counts.
    Raises ConfigError.
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
