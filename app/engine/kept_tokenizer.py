"""The tokenizer that a model is trained with: kept in the folder of its run, and found again; and
the token that ends its documents, which the run's checkpoints record.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from app.config import Run
from app.data.sources import file_sum
from app.data.special_tokens import SETTINGS
from app.data.tokenizer import BYTES, EarlierEnd, JsonTokenizer, Tokenizer, json_tokenizer
from app.engine.checkpoint.load import IMPORTED
from app.errors import ConfigError, writing
from app.hf.file_names import TOKENIZER

END = "end_of_document"  # in what a checkpoint records of its data


def keep_tokenizer(run: Run, run_dir: Path, end: str | None = None) -> None:
    """Copy the tokenizer's file into the run folder, beside it the token that ends documents
    (None: the one that the files name): what is trained is of no use without them. Raises
    ConfigError.
    """
    if run.data.tokenizer == BYTES:
        return
    ends = end or json_tokenizer(Path(run.data.tokenizer)).end
    settings = json.dumps({"eos_token": ends}, ensure_ascii=False) + "\n"
    with writing(run_dir):
        contents = Path(run.data.tokenizer).read_bytes()
        for name, kept in ((TOKENIZER, contents), (SETTINGS, settings.encode())):
            path = run_dir / name
            if not path.is_file() or path.read_bytes() != kept:
                path.write_bytes(kept)


def find_tokenizer(
    run_dir: Path, manifest: Mapping[str, Any], besides: Iterable[Path] = ()
) -> Path | None:
    """The file with which the checkpoint of this manifest was trained: the run's own, or the one
    that was named, or one `besides`; None: none that can be read has those contents.
    """
    data = manifest.get("data")  # what they were, not where; None: not known
    expected = None if data is None else data["tokenizer"]
    named = Path(manifest["config"]["data"]["tokenizer"])
    for path in (run_dir / TOKENIZER, named, *besides):
        with suppress(OSError):
            if path.is_file() and (found := file_sum(path)) == (expected or found):
                return path
    return None


def end_of(tokenizer: Tokenizer) -> str | None:
    """Name of the token that ends documents; None: bytes, whose end has no choice."""
    return tokenizer.end if isinstance(tokenizer, JsonTokenizer) else None


def recorded_end(tokenizer: Tokenizer) -> dict[str, str]:
    """What a checkpoint records of the end of its documents."""
    end = end_of(tokenizer)
    return {} if end is None else {END: end}


def kept_end(manifest: Mapping[str, Any] | None, spec: str) -> str | None:
    """The token with which the documents of a checkpoint go on to end, for `load_tokenizer`.

    The checkpoint records it; of one that does not, it is what was taken then, unless that is an
    ordinary token. None: the files of the tokenizer `spec` name it.
    """
    if manifest is None or spec == BYTES or IMPORTED in manifest:
        return None
    recorded: str | None = (manifest.get("data") or {}).get(END)
    return recorded or EarlierEnd.of(Path(spec)).stays


def changed_end(manifest: Mapping[str, Any] | None, spec: str, *, kept: bool = True) -> str | None:
    """How documents end now, where a checkpoint was trained with another end; with `kept` also
    where it is kept and the files of the tokenizer `spec` name another one. None: nothing of that.
    Raises ConfigError.
    """
    if manifest is None or spec == BYTES or IMPORTED in manifest:
        return None
    recorded: str | None = (manifest.get("data") or {}).get(END)
    was = recorded or EarlierEnd.of(Path(spec)).was
    now = json_tokenizer(Path(spec), kept_end(manifest, spec)).end
    if was != now:
        why = "" if recorded else f", an ordinary token of {spec}"
        return f"documents end with {now!r} from here on, and ended with {was!r} so far{why}"
    if not kept:
        return None
    with suppress(ConfigError):  # the files alone leave open which token it is
        named = json_tokenizer(Path(spec)).end
        if named != now:
            return f"documents go on to end with {now!r}, although {spec} ends them with {named!r}"
    return None
