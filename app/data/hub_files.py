"""Files of models on the Hugging Face hub, through the library's cache: downloads and what is said
of their faults.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from app.data.faults import in_one_line
from app.data.offline import go_offline_without_network
from app.errors import ConfigError, nearest_model

NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")  # of a model on the hub
WAIT_S = 60.0  # seconds that a process waits for a small file that another one downloads
POLL_S = 0.05

Found = TypeVar("Found")


def may_be_on_hub(name: str) -> bool:
    """Return whether this may be the name of a model on the hub."""
    return bool(NAME.fullmatch(name)) and not name.startswith(".")


def cached(name: str, file: str) -> Path | None:
    """Return a model's file in the library's cache; None: it is not there."""
    found = huggingface_hub.try_to_load_from_cache(name, file)
    return Path(found) if isinstance(found, str) else None


def wait_for_cached(name: str, file: str, key: str) -> Path:
    """Return a model's file in the library's cache when another process of this host has downloaded
    it. Raises ConfigError about option `key`.
    """
    end = time.monotonic() + WAIT_S
    while (found := cached(name, file)) is None:
        if time.monotonic() > end:
            rule = f"the first process of this host did not download {file} in {WAIT_S:g} s"
            raise ConfigError(key, name, rule)
        time.sleep(POLL_S)
    return found


def explained(name: str, key: str, bring: Callable[[], Found]) -> Found:
    """Return the result of `bring`, which calls the library; turn its errors into ConfigError."""
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
        rule = f"cannot be downloaded from {hub}: {_short(error)}"
    # lost connections and broken answers raise errors of various other libraries
    except Exception as error:
        rule = f"cannot be downloaded from {hub}: {type(error).__name__}: {_short(error)}"
    raise ConfigError(key, name, rule, guess=folder_like(Path(name))) from None


def folder_like(path: Path) -> str | None:
    """Return a local folder with a similar name, as a hint."""
    folders = sorted(each.name for each in path.parent.glob("*") if each.is_dir())
    close = nearest_model(path.name, folders)
    return None if close is None else str(path.parent / close)


def _short(error: Exception) -> str:
    return in_one_line(str(error))
