"""Special tokens of a tokenizer: which one ends a document, and what the files beside it say.

A published tokenizer.json marks tokens as special, but does not say what each is for. That is in
tokenizer_config.json (`eos_token`, `bos_token`), and for generation in generation_config.json or
config.json (`eos_token_id`). An ordinary token may be spelt like another model's marker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import ConfigError
from app.own_files import read_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

KEY = "data.tokenizer"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"  # of older versions of `transformers`
GENERATION = "generation_config.json"
MODEL_CONFIG = "config.json"
# What versions that did not record it took for the end, the first in this order, special or not.
EARLIER_ENDS = (
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
# Names that published tokenizers give to the special token that ends a document …
DOCUMENT_ENDS = (*EARLIER_ENDS[:7], "<|endofdocument|>", "<EOS_TOKEN>", "<EOS>", "<eod>", "<|eod|>")
# … and to one that ends a turn or a segment, which ends documents where there is no other.
SEGMENT_ENDS = EARLIER_ENDS[7:]
MOST_NAMED = 12  # tokens that a message names


def special_tokens(backend: Backend) -> dict[str, int]:
    """Token -> id of the added tokens that a tokenizer's file marks as special, by id."""
    added = sorted(backend.get_added_tokens_decoder().items())
    return {token.content: number for number, token in added if token.special}


def token_name(backend: Backend, number: int) -> str:
    """Name of a token as its file writes it: of an added one, as before any normalization."""
    added = backend.get_added_tokens_decoder().get(number)
    return added.content if added is not None else backend.id_to_token(number) or ""


def end_of_document(backend: Backend, path: Path) -> int:
    """Id of the token that ends a document, for the tokenizer read from `path`.

    1. `eos_token` of the settings beside the file. 2. The one special token with a name of
    DOCUMENT_ENDS; among several, the one that `eos_token_id` of the model beside the file has.
    3. The special token of that `eos_token_id`. 4. The one special token of SEGMENT_ENDS.
    Raises ConfigError where these say nothing, or leave several.
    """
    named = named_token(path.parent, "eos_token")
    if named is not None:
        return _known(backend, path, named)
    special = special_tokens(backend)
    ids = set(model_ids(path.parent, "eos_token_id"))
    documents = [token for token in DOCUMENT_ENDS if token in special]
    of_model = [token for token, number in special.items() if number in ids]
    both = [token for token in documents if token in of_model]
    segments = [token for token in SEGMENT_ENDS if token in special]
    found = next(filter(None, (both, documents, of_model, segments)), [])
    if len(found) == 1:
        return special[found[0]]
    if found:
        told = ", ".join(map(repr, found[:MOST_NAMED]))
        rule = f"{told} are special tokens that may end a document, and nothing says which one does"
    else:
        rule = _no_end(backend, special)
    raise ConfigError(KEY, path, rule, advice=_advice(path, found))


def earlier_end(backend: Backend, path: Path) -> str | None:
    """The token with which versions that did not record it have ended documents, where it stays:
    it is special, or there is no special one in its place. None: another token has to end them.
    """
    was = first_earlier_end(backend)
    if was is None or was in special_tokens(backend):
        return was
    try:
        end_of_document(backend, path)
    except ConfigError:
        return was
    return None


def first_earlier_end(backend: Backend) -> str | None:
    """The first name of EARLIER_ENDS in the vocabulary; None: there is none."""
    return next((token for token in EARLIER_ENDS if backend.token_to_id(token) is not None), None)


def named_token(folder: Path, name: str) -> str | None:
    """`eos_token` or `bos_token` of the settings in a folder; None: they name none. Raises
    ConfigError.
    """
    for file in (SETTINGS, SPECIAL_TOKENS_MAP):
        match read_settings(folder / file).get(name):
            case None:
                continue
            case str(token) | {"content": str(token)}:
                return token
            case other:
                raise _refused(folder / file, f"{name}={json.dumps(other)} is no token")
    return None


def model_ids(folder: Path, name: str) -> tuple[int, ...]:
    """`eos_token_id` or `bos_token_id` of the model in a folder: those of its generation config,
    else of its config.json; it may have several or none. Raises ConfigError.
    """
    for file in (GENERATION, MODEL_CONFIG):
        found = read_settings(folder / file).get(name)
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise _refused(folder / file, f"{name}={json.dumps(found)} is no id and no list of ids")
        return tuple(ids)
    return ()


def ids_with(end: int, named: Any) -> int | list[int]:
    """The value of `eos_token_id` that has `end` besides what it names so far."""
    ids = [each for each in (named if isinstance(named, list) else [named]) if each is not None]
    both = ids if end in ids else [*ids, end]
    return both[0] if len(both) == 1 and not isinstance(named, list) else both


def read_settings(path: Path) -> Mapping[str, Any]:
    """JSON object of a file, empty where there is no file. Raises ConfigError."""
    try:
        found = json.loads(read_regular(path))
        json.dumps(found, ensure_ascii=False).encode()  # fails for halves of UTF-16 characters
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise _refused(path, "cannot be read: no JSON object")
    return found


def _refused(path: Path, rule: str) -> ConfigError:
    return ConfigError(KEY, path.parent, f"{path.name}: {rule}")


def _known(backend: Backend, path: Path, token: str) -> int:
    found: int | None = backend.token_to_id(token)
    if found is None:
        rule = f"{SETTINGS} beside it says eos_token={token!r}, which is not in its vocabulary"
        raise ConfigError(KEY, path, rule, advice=_advice(path, ()))
    return found


def _no_end(backend: Backend, special: Iterable[str]) -> str:
    names = [*special]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    listed = ", ".join(names[:MOST_NAMED]) + more
    rule = f"no token that ends a document; its special tokens: {listed or 'none'}"
    was = first_earlier_end(backend)
    return rule if was is None else f"{rule}, and {was!r} is an ordinary one"


def _advice(path: Path, found: Iterable[str]) -> str:
    example = json.dumps({"eos_token": next(iter(found), "…")}, ensure_ascii=False)
    return f"put the token that does into {path.parent / SETTINGS}: {example}"
