"""Tokenizer files of an exported model: always those of the tokenizer it was trained with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from app.data.special_tokens import SETTINGS, SPECIAL_TOKENS_MAP
from app.data.tokenizer_files import TOKENIZER

# files of other formats that also define a tokenizer, besides TOKENIZER and SETTINGS
VOCABULARIES = ("tokenizer*", "vocab*", "merges.txt", "added_tokens.json")
ABOUT_TOKENS = (SPECIAL_TOKENS_MAP, "chat_template*")
# class of `transformers` that uses TOKENIZER as it is; in version 5 the classes of models rebuild a
# tokenizer from its vocabulary, without added tokens
AS_IT_IS = "PreTrainedTokenizerFast"


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """Tokenizer that a model was trained with: contents of a `tokenizers` JSON file."""

    contents: bytes
    end: str  # end-of-document token
    end_id: int


def with_tokenizer(
    texts: Mapping[str, bytes], tokenizer: TrainedTokenizer | None
) -> dict[str, bytes]:
    """Return the files that came with the initial model, with the tokenizer that the model was
    trained with in place of theirs; None removes it. Raises ValueError if SETTINGS is not a JSON
    object.
    """
    if tokenizer is not None and texts.get(TOKENIZER) == tokenizer.contents:
        return {**texts, **_with_end(texts, tokenizer)}
    gone = VOCABULARIES if tokenizer is not None else (*VOCABULARIES, *ABOUT_TOKENS)
    kept = {
        name: contents
        for name, contents in texts.items()
        if not any(fnmatch(name, pattern) for pattern in gone)
    }
    if tokenizer is None:
        return kept
    made = _written(_settings(_read(texts, SETTINGS), tokenizer))
    return {
        **kept,
        **_with_end({**kept, SETTINGS: made}, tokenizer),
        TOKENIZER: tokenizer.contents,
        SETTINGS: made,
    }


def _read(texts: Mapping[str, bytes], name: str) -> dict[str, Any]:
    settings = json.loads(texts.get(name, b"{}"))
    if not isinstance(settings, dict):
        raise ValueError("is not a JSON object")
    return settings


def _written(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def _with_end(texts: Mapping[str, bytes], tokenizer: TrainedTokenizer) -> dict[str, bytes]:
    """Return corrected versions of the files that name another end-of-document token, or none."""
    if SETTINGS not in texts:
        return {SETTINGS: _written(_settings({}, tokenizer))}
    changed = {}
    for name in (SETTINGS, SPECIAL_TOKENS_MAP):
        settings = _read(texts, name)
        said = settings.get("eos_token")
        told = said.get("content") if isinstance(said, dict) else said
        if told != tokenizer.end and (name == SETTINGS or said is not None):
            changed[name] = _written({**settings, "eos_token": tokenizer.end})
    return changed


def _settings(theirs: dict[str, Any], tokenizer: TrainedTokenizer) -> dict[str, Any]:
    """Return their settings, limited to tokens that exist in the new tokenizer."""
    added = {
        str(token["id"]): {name: value for name, value in token.items() if name != "id"}
        for token in json.loads(tokenizer.contents).get("added_tokens", ())
    }
    kept = {name: value for name, value in theirs.items() if name != "auto_map"}
    return {
        **kept,
        "eos_token": tokenizer.end,
        "added_tokens_decoder": added,
        "tokenizer_class": AS_IT_IS,
    }
