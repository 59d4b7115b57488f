"""Keys that a hint must not change: those typed, and the sizes of a chosen model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from app.cli.options.arguments import Typed, key_of
from app.cli.processes.home import CONF
from app.config.renamed import new_key

TOYS = ("moe_tiny", "dense_tiny")  # models whose sizes nobody has published


@dataclass(frozen=True, slots=True)
class Fixed:
    """Names of keys and groups that are fixed."""

    typed: frozenset[str] = frozenset()  # on the command line, with what typed options set
    sizes: frozenset[str] = frozenset()  # of the chosen model

    @classmethod
    def of(cls, typed: Typed) -> Fixed:
        """Return what these arguments fix."""
        names = set[str]()
        sizes = set[str]()
        for word in typed.overrides:
            name, option = key_of(word), word.partition("=")[2]
            names.add(name)
            for folder in _folders(typed):
                set_by = _read(folder / name / f"{option}.yaml")
                if name == "experiment":
                    sizes |= _model_of(set_by, folder)
                elif name == "model":
                    sizes |= set(_keys(set_by, "model.")) if option not in TOYS else set()
                else:
                    names |= set(_keys(set_by, f"{name}."))
        return cls(frozenset(map(new_key, names)), frozenset(map(new_key, sizes)))


def _folders(typed: Typed) -> Iterator[Path]:
    yield typed.folder
    if typed.config_dir is not None:
        yield Path(typed.config_dir)
    if typed.folder != CONF:
        yield CONF


def _read(path: Path) -> dict[str, object]:
    """Read a YAML file of options; empty if it is missing or broken, which composing reports."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _keys(values: dict[str, object], prefix: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")
        elif name != "defaults":
            yield f"{prefix}{name}"


def _model_of(experiment: dict[str, object], folder: Path) -> set[str]:
    """Return the keys of the model that an experiment, or the one that it extends, chooses."""
    found = set[str]()
    listed = experiment.get("defaults")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, str):
            found |= _model_of(_read(folder / "experiment" / f"{each}.yaml"), folder)
        elif isinstance(each, dict) and each.get("override /model", TOYS[0]) not in TOYS:
            option = each["override /model"]
            found = set(_keys(_read(folder / "model" / f"{option}.yaml"), "model."))
    return found
