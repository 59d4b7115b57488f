"""Overrides held to the types of their keys, without composing a run: a thousand times cheaper."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from app.cli.options.keys import is_section, type_of
from app.config import Run
from tests.training import ROOT


def check_types(words: Iterable[str]) -> None:
    """Assert that every override is a key with a value of its type, or an option of a group.

    Hydra's own keys are left out; of a sweep, the key alone is looked at. Raises what OmegaConf
    raises for a value of another type.
    """
    for each in OverridesParser.create().parse_overrides(list(words)):
        key = each.key_or_group
        if key.startswith("hydra"):
            continue
        if (ROOT / "conf" / key).is_dir() and not isinstance(_value(each), dict):
            assert each.is_sweep_override() or _has_option(key, _value(each)), each.input_line
        elif not each.is_sweep_override():
            section, _, name = key.rpartition(".")
            assert type_of(key) is not None, each.input_line
            if not is_section(key):
                _defaults(type_of(section) if section else Run)[name] = _value(each)
        else:
            assert type_of(key) is not None, each.input_line


def _value(override: Override) -> Any:
    return None if override.is_sweep_override() else override.value()


def _has_option(group: str, name: object) -> bool:
    return (ROOT / "conf" / group / f"{name}.yaml").is_file()


@cache
def _defaults(section: type) -> DictConfig:
    node = OmegaConf.structured(section)
    assert isinstance(node, DictConfig)
    OmegaConf.set_readonly(node, False)
    return node
