"""Datasets of the Hugging Face hub and of local folders, and what is said of their faults."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import datasets
from huggingface_hub import constants
from huggingface_hub.utils.tqdm import disable_progress_bars as disable_hub_bars

from app.choices import Source
from app.config import DataConfig
from app.data.paths import most_like, source_option
from app.data.reach import go_offline_without_network
from app.errors import ConfigError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})  # what a disk says
MOST_TEXT = 300  # characters of what the library says

Loaded = TypeVar("Loaded")


def hub_files(config: DataConfig) -> tuple[list[str], str | None]:
    """Files of the splits of a local folder, in order; for a dataset of the hub, its commit."""
    silence()
    name = str(config.name)
    check_folder(name)
    options = {"name": config.config_name, "cache_dir": config.cache_dir}
    builder = explained(config, lambda: datasets.load_dataset_builder(name, **options))
    if not os.path.isdir(name):
        return [], str(builder.hash)
    splits = builder.config.data_files or {}
    # "train[:10%]+test": train and test.
    wanted = set(re.findall(r"(?:^|\+)\s*(\w+)", config.split))
    read = [paths for split, paths in splits.items() if str(split) in wanted]
    return [str(path) for paths in read for path in paths], None


def check_folder(name: str) -> None:
    """Raise ConfigError for a name that looks like a folder and is none."""
    if name.startswith(("/", ".")) and not os.path.isdir(name):
        folders = [path for path in Path(name).parent.glob("*") if path.is_dir()]
        raise ConfigError(
            "data.name", name, "no such folder", guess=most_like(Path(name).name, folders)
        )


def explained(config: DataConfig, load: Callable[[], Loaded]) -> Loaded:
    """`load()`; what the library raises becomes a ConfigError about the place that it reads."""
    if config.source is Source.hub and not os.path.isdir(str(config.name)):
        go_offline_without_network()
    try:
        return load()
    except ConfigError:
        raise
    # network, file format, unknown split or configuration: the library has a type for each
    except Exception as error:
        reason = error.__cause__ or error
        if isinstance(reason, ConfigError):  # raised by what the library has called
            raise reason from None
        if isinstance(reason, OSError) and reason.errno in FULL:
            rule = f"cannot be written: {reason.strerror}"
            raise ConfigError(
                "data.cache_dir", config.cache_dir, rule, advice="make room there"
            ) from None
        if isinstance(reason, ConnectionError) and constants.HF_HUB_OFFLINE:
            rule = f"is not in the cache, and {constants.ENDPOINT} cannot be reached"
            raise ConfigError(*source_option(config), rule) from error
        text = re.sub(r"\s+", " ", f"{type(reason).__name__}: {reason}")
        raise ConfigError(
            *source_option(config), f"cannot be loaded: {text[:MOST_TEXT]}"
        ) from error


def silence() -> None:
    """No progress bars, which all ranks would draw, and no log lines: errors are raised."""
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    disable_hub_bars()
