"""Where the tokenizer of data.tokenizer is: a file, a folder, a run, or a model on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from app.data.special_tokens import GENERATION, KEY, MODEL_CONFIG, SETTINGS, SPECIAL_TOKENS_MAP
from app.errors import ConfigError, nearest

TOKENIZER = "tokenizer.json"  # of the `tokenizers` library
SENTENCEPIECE = "tokenizer.model"
TEMPLATE = "chat_template.jinja"
# a run has its own file, or that of its initial model
PLACES = (TOKENIZER, f"pretrained/{TOKENIZER}")
TEMPLATES = "chat_template*"
BESIDE = (SETTINGS, SPECIAL_TOKENS_MAP, GENERATION, MODEL_CONFIG, TEMPLATES)
LIKE_FILE = re.compile(r"\.(json|model|txt)$")


def tokenizer_file(spec: str) -> Path:
    """Return the `tokenizers` JSON file that `data.tokenizer` names: itself, that of a folder or a
    run, or that of a model on the hub, if it is in the library's cache. Raises ConfigError.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        found = next((path / place for place in PLACES if (path / place).is_file()), None)
        if found is None:
            raise _nothing_in(path)
        return found
    if not _on_hub(spec):
        rule = (
            "no such file; give 'bytes', a tokenizers JSON file or its folder, or a name on the hub"
        )
        raise ConfigError(KEY, spec, rule, guess=_nearest_json(path))
    from app.data.hub_files import cached

    if (file := cached(spec, TOKENIZER)) is None:
        raise ConfigError(KEY, spec, "no such file or folder, and not in the cache of the hub")
    return file


def bring_tokenizer(spec: str, asks: bool) -> None:
    """Download the tokenizer of a model on the hub; do nothing for other names.

    Unless this process `asks`, wait until another one of this host has downloaded it. Raises
    ConfigError.
    """
    if Path(spec).expanduser().exists() or not _on_hub(spec):
        return
    import huggingface_hub

    from app.data.hub_files import explained, wait_for_cached

    if not asks:
        wait_for_cached(spec, TOKENIZER, KEY)
        return

    def bring() -> None:
        # the file that others wait for comes last
        commit = Path(huggingface_hub.snapshot_download(spec, allow_patterns=[*BESIDE])).name
        huggingface_hub.hf_hub_download(spec, TOKENIZER, revision=commit)

    explained(spec, KEY, bring)


def _on_hub(spec: str) -> bool:
    """Return whether this may be the name of a model on the hub, with its owner's."""
    if "/" not in spec or LIKE_FILE.search(spec):
        return False
    from app.data.hub_files import may_be_on_hub

    return may_be_on_hub(spec)


def _nothing_in(path: Path) -> ConfigError:
    if (path / SENTENCEPIECE).is_file():
        rule = f"has a {SENTENCEPIECE} and no {TOKENIZER}, which is read here"
        return ConfigError(KEY, path, rule, advice="AutoTokenizer of transformers saves one")
    others = sorted(_json_of(path))
    guess = str(path / others[0]) if len(others) == 1 else None
    return ConfigError(KEY, path, f"has no {TOKENIZER}", guess=guess)


def _json_of(folder: Path) -> Iterator[str]:
    return (file.name for file in folder.glob("*.json"))


def _nearest_json(path: Path) -> str | None:
    names = sorted(_json_of(path.parent))
    close = nearest(path.name, names) or (names[0] if len(names) == 1 else None)
    return str(path.parent / close) if close else None
