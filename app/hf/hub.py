"""From what a user names, a folder or a model on the Hugging Face hub, to a folder here."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.data.faults import in_one_line
from app.data.special_tokens import SPECIAL_TOKENS_MAP
from app.errors import ConfigError, nearest_model
from app.hf.file_names import CONFIG_JSON, INDEX, ONE_FILE

CHAT_TEMPLATES = "additional_chat_templates"  # a folder of those that have names
# What is needed of a model besides its weights, and no code.
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
PRETRAINED = "pretrained"  # in a run folder: what came with the model that it started from
NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")  # of a model on the hub
SNAPSHOTS = "snapshots"  # in the library's cache: folders that are called after commits
WAIT_S = 60.0  # that one process waits for a small file that another one brings
POLL_S = 0.05

Found = TypeVar("Found")


def config_folder(name: str, key: str, asks: bool = True) -> Path:
    """A folder with the model's config.json. Raises ConfigError, with `key` for who has asked.

    `asks`: whether this process asks the hub; otherwise it waits until another one of this host has
    brought the file.
    """
    if (folder := _local(name, key)) is not None:
        return folder
    if not asks:
        return _cached_config(name, key).parent
    path = _explained(name, key, lambda: huggingface_hub.hf_hub_download(name, CONFIG_JSON))
    return Path(path).parent


def model_folder(name: str, key: str, commit: str | None = None, asks: bool = True) -> Path:
    """A folder with all of the model, brought from the hub where it is not here. Raises as above.

    `commit`: which one of the hub's; None: the newest. With `asks` false it has to be here.
    """
    if (folder := _local(name, key)) is not None:
        if folder != Path(name).expanduser():
            rule = "is a run, which keeps of the model that it began with all but the weights"
            advice = f"resume={name} goes on from its own, and to-hf writes them"
            raise ConfigError(key, name, rule, advice=advice)
        return folder
    return _explained(name, key, lambda: _model(name, commit, asks=asks))


def texts_folder(name: str, key: str) -> Path:
    """A folder with configurations and tokenizer of the model, as `model_folder`."""
    if (folder := _local(name, key)) is not None:
        return folder
    return _explained(name, key, lambda: _snapshot(name, None, TEXTS, asks=True))


def commit_of(folder: Path) -> str | None:
    """The commit of the hub that a folder of its cache holds; None for other folders."""
    return folder.name if folder.parent.name == SNAPSHOTS else None


def _model(name: str, commit: str | None, *, asks: bool) -> Path:
    """Texts and weights. Of these the one file, or else those of the index, and no others, which
    some repositories have in further formats; `app.hf.files` and `transformers` choose alike.
    """
    folder = _snapshot(name, commit, (*TEXTS, INDEX), asks=asks)
    at = folder.name
    try:
        huggingface_hub.hf_hub_download(name, ONE_FILE, revision=at, local_files_only=not asks)
    except errors.EntryNotFoundError as error:
        if files := _indexed(folder / INDEX):
            _snapshot(name, at, files, asks=asks)
        elif isinstance(error, errors.LocalEntryNotFoundError):
            raise  # it may be on the hub
    return folder


def _snapshot(name: str, commit: str | None, patterns: Sequence[str], *, asks: bool) -> Path:
    found = huggingface_hub.snapshot_download(
        name, revision=commit, allow_patterns=[*patterns], local_files_only=not asks
    )
    return Path(found)


def _indexed(path: Path) -> list[str]:
    """The files that an index names; none where it is broken, as who reads it will say."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted({file for file in files if isinstance(file, str)})


def _cached_config(name: str, key: str) -> Path:
    end = time.monotonic() + WAIT_S
    while True:
        found = huggingface_hub.try_to_load_from_cache(name, CONFIG_JSON)
        if isinstance(found, str):
            return Path(found)
        if time.monotonic() > end:
            rule = f"the first process of this host has not brought {CONFIG_JSON} in {WAIT_S:g} s"
            raise ConfigError(key, name, rule)
        time.sleep(POLL_S)


def _local(name: str, key: str) -> Path | None:
    """The folder of this name; None: it may be on the hub."""
    path = Path(name).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise ConfigError(key, name, f"cannot be read: {error.strerror}") from error
    if path.is_dir():
        # a run that started from a model has what came with it
        return path / PRETRAINED if (path / PRETRAINED / CONFIG_JSON).is_file() else path
    if exists:
        guess = str(path.parent) if (path.parent / CONFIG_JSON).is_file() else None
        raise ConfigError(key, name, "is a file, and a model is a folder", guess=guess)
    if NAME.fullmatch(name) and not name.startswith("."):
        return None
    raise ConfigError(key, name, "no such folder", guess=_folder_like(path))


def _folder_like(path: Path) -> str | None:
    """A folder here that may have been meant."""
    folders = sorted(each.name for each in path.parent.glob("*") if each.is_dir())
    close = nearest_model(path.name, folders)
    return None if close is None else str(path.parent / close)


def _explained(name: str, key: str, bring: Callable[[], Found]) -> Found:
    """What the library brings; what it raises becomes a ConfigError."""
    # brings the library of datasets along, a second that folders do without
    from app.data.hub import go_offline_without_network

    disable_progress_bars()
    go_offline_without_network()
    hub = constants.ENDPOINT
    try:
        return bring()
    except errors.GatedRepoError:
        rule = f"is gated on {hub}: accept its terms there, then log in (hf auth login)"
    except errors.RepositoryNotFoundError:
        rule = f"no such folder, and no such model on {hub}, or none that you may read"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError):
        rule = f"no such folder; is not in the cache either, and {hub} cannot be reached"
    except errors.EntryNotFoundError as error:
        rule = f"is no model on {hub}: {_short(error)}"
    except errors.HFValidationError as error:
        rule = f"no such folder, and no name of a model: {_short(error)}"
    except (errors.HfHubHTTPError, OSError) as error:
        rule = f"cannot be brought from {hub}: {_short(error)}"
    # a connection that breaks, an answer that is none: the library has others' types for each
    except Exception as error:
        rule = f"cannot be brought from {hub}: {type(error).__name__}: {_short(error)}"
    raise ConfigError(key, name, rule, guess=_folder_like(Path(name))) from None


def _short(error: Exception) -> str:
    return in_one_line(str(error))
