"""Find the folder of a Hugging Face model: a local folder, or a download from the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors

from app.data.hub_files import explained, folder_like, may_be_on_hub, wait_for_cached
from app.data.special_tokens import SPECIAL_TOKENS_MAP
from app.errors import ConfigError
from app.hf.file_names import CONFIG_JSON, EXPORTED, INDEX, ONE_FILE, PICKLE, PICKLE_INDEX
from app.programs import command_name

CHAT_TEMPLATES = "additional_chat_templates"  # folder of named chat templates
# files needed besides the weights: configurations and tokenizer, no code
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    SPECIAL_TOKENS_MAP,
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
    f"{CHAT_TEMPLATES}/*.jinja",
)
PRETRAINED = "pretrained"  # subfolder of a run: configurations and tokenizer of its initial model
CONFIG_YAML = "config.yaml"  # of a run
SNAPSHOTS = "snapshots"  # in the library's cache: contains a folder per commit


def config_folder(name: str, key: str, asks: bool = True) -> Path:
    """Return a folder with the model's config.json. Raises ConfigError about option `key`.

    With `asks` this process asks the hub; otherwise it waits until another process of this host
    has downloaded the file.
    """
    if (folder := _local(name, key)) is not None:
        return folder
    if not asks:
        return wait_for_cached(name, CONFIG_JSON, key).parent
    path = explained(name, key, lambda: huggingface_hub.hf_hub_download(name, CONFIG_JSON))
    return Path(path).parent


def model_folder(name: str, key: str, commit: str | None = None, asks: bool = True) -> Path:
    """Return a folder with the complete model, downloaded if it is not local. Raises ConfigError.

    `commit` chooses the hub's commit; None means the newest. Unless `asks`, it must be local.
    """
    if (folder := _local(name, key)) is not None:
        if folder != Path(name).expanduser():
            rule = "is a run, which does not keep the weights that it started from"
            advice = f"resume={name} continues from its own weights, and to-hf exports them"
            raise ConfigError(key, name, rule, advice=advice)
        return folder
    return explained(name, key, lambda: _model(name, commit, asks=asks))


def texts_folder(name: str, key: str) -> Path:
    """Return a folder with the model's configurations and tokenizer, found as in `model_folder`."""
    if (folder := _local(name, key)) is not None:
        return folder
    return explained(name, key, lambda: _snapshot(name, None, TEXTS, asks=True))


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder in the hub's cache; None for other folders."""
    return folder.name if folder.parent.name == SNAPSHOTS else None


def _model(name: str, commit: str | None, *, asks: bool) -> Path:
    """Download configurations, tokenizer and weights: the single safetensors file, or else those of
    the index, or else those that torch.save wrote, as `app.hf.files` and `transformers` choose.
    Further formats of a repository are not downloaded.
    """
    patterns: Sequence[str] = TEXTS
    for one, index in (ONE_FILE, INDEX), (PICKLE, PICKLE_INDEX):
        folder = _snapshot(name, commit, (*patterns, index), asks=asks)
        patterns, commit = (), folder.name
        try:
            huggingface_hub.hf_hub_download(name, one, revision=commit, local_files_only=not asks)
            return folder
        except errors.EntryNotFoundError as error:
            missing = error
        if files := _indexed(folder / index):
            _snapshot(name, commit, files, asks=asks)
            return folder
        # offline and not in the cache, but the hub may have it: another format only if that is
        asks = asks and not isinstance(missing, errors.LocalEntryNotFoundError)
    if isinstance(missing, errors.LocalEntryNotFoundError):
        raise missing
    return folder


def _snapshot(name: str, commit: str | None, patterns: Sequence[str], *, asks: bool) -> Path:
    found = huggingface_hub.snapshot_download(
        name, revision=commit, allow_patterns=[*patterns], local_files_only=not asks
    )
    return Path(found)


def _indexed(path: Path) -> list[str]:
    """Return the files that an index names; none if it is broken, which its reader reports."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted({file for file in files if isinstance(file, str)})


def _run_instead(path: Path, name: str, key: str) -> ConfigError:
    """Return the refusal of a run that started without a model: of its export, if there is one."""
    rule = "is a run, and a model is a Hugging Face folder"
    if (path / EXPORTED / CONFIG_JSON).is_file():
        return ConfigError(key, name, rule, nearest=f"{name.rstrip('/')}/{EXPORTED}")
    advice = f"{command_name('convert')} to-hf {name} FOLDER writes one"
    return ConfigError(key, name, rule, advice=advice)


def _local(name: str, key: str) -> Path | None:
    """Return the local folder of this name; None if it may be a name on the hub."""
    path = Path(name).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise ConfigError(key, name, f"cannot be read: {error.strerror}") from error
    if path.is_dir():
        # a run folder keeps the configurations of the model that it started from
        if (path / PRETRAINED / CONFIG_JSON).is_file():
            return path / PRETRAINED
        if not (path / CONFIG_JSON).is_file() and (path / CONFIG_YAML).is_file():
            raise _run_instead(path, name, key)
        return path
    if exists:
        guess = str(path.parent) if (path.parent / CONFIG_JSON).is_file() else None
        raise ConfigError(key, name, "is a file, and a model is a folder", guess=guess)
    if may_be_on_hub(name):
        return None
    raise ConfigError(key, name, "no such folder", guess=folder_like(path))
