"""From what a user names, a folder or a model on the Hugging Face hub, to a folder here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.data.paths import most_like
from app.errors import ConfigError
from app.hf.config_json import CONFIG_JSON

# What is needed of a model, and no code.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "chat_template*",
)
PRETRAINED = "pretrained"  # in a run folder: what came with the model that it started from
NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")  # of a model on the hub
MOST_TEXT = 300  # characters of what the library says

Found = TypeVar("Found")


def config_folder(name: str, key: str) -> Path:
    """A folder with the model's config.json. Raises ConfigError, with `key` for who has asked."""
    if (folder := _local(name, key)) is not None:
        return folder
    path = _explained(name, key, lambda: huggingface_hub.hf_hub_download(name, CONFIG_JSON))
    return Path(path).parent


def model_folder(name: str, key: str) -> Path:
    """A folder with all of the model, brought from the hub where it is not here. Raises as above.

    One process of each host may ask at first; the others find what it has brought.
    """
    if (folder := _local(name, key)) is not None:
        return folder
    wanted = [*WEIGHTS, *TEXTS]
    bring = huggingface_hub.snapshot_download
    return Path(_explained(name, key, lambda: bring(name, allow_patterns=wanted)))


def _local(name: str, key: str) -> Path | None:
    """The folder of this name; None: it may be on the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        # a run that started from a model has what came with it
        return path / PRETRAINED if (path / PRETRAINED / CONFIG_JSON).is_file() else path
    if NAME.fullmatch(name) and not name.startswith("."):
        return None
    folders = [each for each in path.parent.glob("*") if each.is_dir()]
    rule = "no such folder" if not path.exists() else "is a file, and a model is a folder"
    raise ConfigError(key, name, rule, guess=most_like(path.name, folders))


def _explained(name: str, key: str, bring: Callable[[], Found]) -> Found:
    """What the library brings; what it raises becomes a ConfigError."""
    # brings the library of datasets along, a second that folders do without
    from app.data.reach import go_offline_without_network

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
    raise ConfigError(key, name, rule) from None


def _short(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).strip()[:MOST_TEXT]
