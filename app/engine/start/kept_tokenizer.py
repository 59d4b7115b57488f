"""Keep the tokenizer of a run in its folder and find it again.

Checkpoints also record the token that ends documents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.choices import Source
from app.config import DataConfig, Run
from app.data.sources import file_sum
from app.data.special_tokens import SETTINGS
from app.data.tokenizer import BYTES, EarlierEnd, JsonTokenizer, Tokenizer, json_tokenizer
from app.data.tokenizer_files import TEMPLATE, TOKENIZER, tokenizer_file
from app.engine.files.manifest import END
from app.engine.files.names import IMPORTED
from app.errors import ConfigError, writing
from app.own_files import read_regular, write_whole

if TYPE_CHECKING:
    from app.data.chat_template import ChatTemplate


def keep_tokenizer(run: Run, run_dir: Path, end: str | None = None) -> None:
    """Copy the tokenizer file into the run folder, and write the end-of-document token beside it;
    of a run on conversations the chat template too.

    The trained model is useless without them. `end` None takes the token that the tokenizer's files
    name. Raises ConfigError.
    """
    template, texts = _template(run.data), dict[str, bytes]()
    if template is not None:
        texts[TEMPLATE] = template.source.encode()
    if run.data.tokenizer != BYTES:
        file = tokenizer_file(run.data.tokenizer)
        texts[TOKENIZER] = file.read_bytes()
        named = {"eos_token": end or json_tokenizer(file).end}
        named = {**(template.tokens if template else {}), **named}
        texts[SETTINGS] = (json.dumps(named, ensure_ascii=False) + "\n").encode()
    if not texts:
        return
    with writing(run_dir):
        for name, kept in texts.items():
            path = run_dir / name
            if not path.is_file() or read_regular(path) != kept:
                write_whole(path, kept)


def _template(data: DataConfig) -> ChatTemplate | None:
    """Return the template of the first source of conversations; None: there is none."""
    for config in (data, *(alone for _, alone in data.parts)):
        if config.source is Source.chat:
            from app.data.chat import chat_template  # imports jinja2

            return chat_template(config)
    return None


def find_tokenizer(
    run_dir: Path, manifest: Mapping[str, Any], besides: Iterable[Path] = ()
) -> Path | None:
    """Find the tokenizer file that the checkpoint of this manifest was trained with.

    Candidates are the run folder's copy, the path in the config, and `besides`. None if no readable
    candidate has the recorded contents.
    """
    data = manifest.get("data")  # checksums, not paths; None if the checkpoint has no record
    expected = None if data is None else data["tokenizer"]
    named: tuple[Path, ...] = ()
    with suppress(ConfigError):  # it may have gone
        named = (tokenizer_file(manifest["config"]["data"]["tokenizer"]),)
    for path in (run_dir / TOKENIZER, *named, *besides):
        with suppress(OSError):
            if path.is_file() and (found := file_sum(path)) == (expected or found):
                return path
    return None


def end_of(tokenizer: Tokenizer) -> str | None:
    """Return the end-of-document token; None for bytes, whose end is fixed."""
    return tokenizer.end if isinstance(tokenizer, JsonTokenizer) else None


def recorded_end(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the checkpoint's record of the end-of-document token."""
    end = end_of(tokenizer)
    return {} if end is None else {END: end}


def kept_end(manifest: Mapping[str, Any] | None, spec: str) -> str | None:
    """Return the end-of-document token that a resumed run keeps, for `load_tokenizer`.

    Checkpoints record it. For one without a record it is the token that the version of that time
    chose, unless that is an ordinary token. None leaves the choice to the files of tokenizer
    `spec`.
    """
    if manifest is None or spec == BYTES or IMPORTED in manifest:
        return None
    recorded: str | None = (manifest.get("data") or {}).get(END)
    return recorded or EarlierEnd.of(tokenizer_file(spec)).stays


def changed_end(manifest: Mapping[str, Any] | None, spec: str, *, kept: bool = True) -> str | None:
    """Say how documents end now if the checkpoint was trained with another end-of-document token.

    With `kept`, also say so if the token stays but the files of tokenizer `spec` name another.
    None if neither holds. Raises ConfigError.
    """
    if manifest is None or spec == BYTES or IMPORTED in manifest:
        return None
    recorded: str | None = (manifest.get("data") or {}).get(END)
    file = tokenizer_file(spec)
    was = recorded or EarlierEnd.of(file).was
    now = json_tokenizer(file, kept_end(manifest, spec)).end
    if was != now:
        why = "" if recorded else f", an ordinary token of {spec}"
        return f"documents end with {now!r} from here on, and ended with {was!r} so far{why}"
    if not kept:
        return None
    with suppress(ConfigError):  # raised if the files do not say which token it is
        named = json_tokenizer(file).end
        if named != now:
            return f"documents still end with {now!r}, although {spec} ends them with {named!r}"
    return None
