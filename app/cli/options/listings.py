"""What programs list: keys in completion and `--cfg job` without the advanced ones, and values
spelt as one types them; Hydra offers the current value in Python's spelling.
"""

from __future__ import annotations

import typing
from enum import Enum
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.plugins.completion_plugin import CompletionPlugin
from omegaconf import DictConfig, OmegaConf

from app.cli.options.keys import default_of, type_of
from app.config.advanced import ADVANCED, is_advanced
from app.errors import typed
from app.programs import with_names

HYDRAS_MATCHES = CompletionPlugin._get_matches
HYDRAS_CONFIG = Hydra.get_sanitized_cfg
HYDRAS_HELP = Hydra.get_help
NOTHING = object()


def list_as_ours() -> None:
    """Replace what Hydra offers for completion, in every shell, and prints for `--cfg job` and
    `--help`.
    """
    CompletionPlugin._get_matches = staticmethod(_matches)  # type: ignore[method-assign]
    Hydra.get_sanitized_cfg = _shown  # type: ignore
    Hydra.get_help = _help  # type: ignore


def _matches(config: Any, word: str) -> list[str]:
    key, equals, begun = word.partition("=")
    if equals:
        return [f"{key}={value}" for value in values_of(key) if value.startswith(begun)]
    found = HYDRAS_MATCHES(config, word)
    if not OmegaConf.is_config(config) or config._get_parent() is not None:
        return found  # Hydra calls this for each part of a dotted name: names are whole at the root
    # advanced keys once what is typed leads to no others
    return [each for each in found if not is_advanced(each.rstrip("=."))] or found


def _shown(hydra: Hydra, config: DictConfig, kind: str) -> DictConfig:
    found = HYDRAS_CONFIG(hydra, config, kind)
    return without_advanced(found) if kind == "job" else found


def _help(hydra: Hydra, *arguments: Any, **named: Any) -> str:
    return with_names(HYDRAS_HELP(hydra, *arguments, **named))


def without_advanced(config: DictConfig) -> DictConfig:
    """Return a configuration without the advanced keys that have their default and that no
    reference names.
    """
    text = OmegaConf.to_yaml(config)
    values: dict[str, Any] = OmegaConf.to_container(config, enum_to_str=True)  # type: ignore
    for key in ADVANCED:
        *names, last = key.split(".")
        section: Any = values
        for name in names:
            section = (section or {}).get(name)
        default = default_of(key)
        usual = list(default) if isinstance(default, tuple) else default
        if section and section.get(last, NOTHING) == usual and f"{{{key}" not in text:
            del section[last]
    return OmegaConf.create(values)


def values_of(key: str) -> list[str]:
    """Return the values of a key with a closed set of them, else its default; none if it is
    unknown.
    """
    kind = type_of(key)
    found = list[str]()
    for hint in (kind, *typing.get_args(kind)):
        if isinstance(hint, type) and issubclass(hint, Enum):
            found += [str(choice.value) for choice in hint]
        elif hint is bool:
            found += ["false", "true"]
    if kind is not None and not found:
        default = default_of(key)
        found = [] if default is None or default == () else [typed(default)]
    return found + ["null"] * (type(None) in typing.get_args(kind))
