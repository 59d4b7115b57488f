"""The bridge from Hydra's composed YAML to the frozen `Run`."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from types import NoneType
from typing import Any

from hydra import compose
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from app.cli.options.arguments import CONFIG_NAME, Typed
from app.cli.options.continued import RunSettings
from app.cli.options.pretrained import adopt, check_agreement, of_config_json
from app.config import ModelConfig, MoEConfig, Run
from app.errors import ConfigError, nearest
from app.hf.families import family_of
from app.rules import check

SAVED = "saved_run"  # in conf/train.yaml's list: settings of a run that is continued
# hydra_plugins/
PLUGINS = {
    "hydra/launcher": ("torchrun", "TorchrunLauncher"),
    "hydra/sweeper": ("grid", "GridSweeper"),
}
_FROM_ENVIRONMENT = re.compile(r"\boc\.env:\s*([A-Za-z_]\w*)")
_SECRETS = ("APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL",
            "CREDENTIALS")  # fmt: skip


def _defaults() -> Run:
    # with a section for experts, so that overrides can reach into it
    return Run(ModelConfig(moe=MoEConfig()))


def register_schema() -> None:
    """Make the types of `Run` the schema that every YAML file and override is checked against,
    and name our plugins, and what presets refer to.
    """
    ConfigStore.instance().store(name="run_schema", node=run_schema())
    ConfigStore.instance().store(name=SAVED, node={})
    OmegaConf.register_new_resolver("config_json", of_config_json, replace=True)
    for group, (option, plugin) in PLUGINS.items():
        ConfigStore.instance().store(
            group=group, name=option, node={"_target_": f"hydra_plugins.graphfold.{plugin}"}
        )


def settle_saved(typed: Typed, world_size: int | None) -> None:
    """Have what is composed from here on hold the settings of the run that these arguments
    continue. To be called where `typed.looked_up()`, after `register_schema`.
    """
    saved = RunSettings.of(typed)
    node = {} if saved is None else saved.beside(typed, all_keys(), world_size)
    ConfigStore.instance().store(name=SAVED, node=node)


def settings_line(typed: Typed) -> str | None:
    """Return what a run says of the settings that it continues with; None where it has its own."""
    saved = RunSettings.of(typed)
    if saved is None:
        return None
    unknown = saved.unknown(all_keys())
    left = f"; without keys that this version lacks: {', '.join(unknown)}" if unknown else ""
    return f"of {saved.file}; what is typed counts over them{left}"


def run_schema() -> DictConfig:
    """The types of `Run`, with its defaults, as what others merge into."""
    schema = OmegaConf.structured(_defaults())
    assert isinstance(schema, DictConfig)
    _make_writable(schema)
    return schema


def _make_writable(node: DictConfig) -> None:
    # Frozen dataclasses become read-only nodes, which refuse every merge; null sections do as well.
    OmegaConf.set_readonly(node, None)
    for key in () if node._is_none() else node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            _make_writable(child)


def load_run(config: DictConfig, world_size: int | None, asks_hub: bool = True) -> Run:
    """Type, freeze and check a composed configuration.

    `world_size` is the number of processes the launcher started, None without one. `asks_hub`:
    whether this process asks the hub for a model that is named, as one of each host does. Raises
    ConfigError.
    """
    if OmegaConf.get_type(config) is not Run:  # of a file that does not begin with the schema
        merged = OmegaConf.merge(run_schema(), config)
        assert isinstance(merged, DictConfig)
        config = merged
    asked = config.parallel.world_size
    if world_size is not None:
        if asked not in (None, world_size):
            raise ConfigError(
                "parallel.world_size",
                asked,
                f"the launcher started {world_size} processes",
                nearest=world_size,
            )
        config.parallel.world_size = world_size
    _refuse_unknown(config)
    _refuse_secrets(config)
    pretrained = adopt(config.model, asks_hub)
    run = OmegaConf.to_object(config)
    assert isinstance(run, Run)
    if pretrained is not None:
        check_agreement(run, pretrained)
    if run.checkpoint.export_hf:
        family_of(run.model, "checkpoint.export_hf", True)
    return check(run)


def load_overrides(overrides: Sequence[str], world_size: int | None = None) -> Run:
    """The checked run that overrides of train.py describe, whatever the working directory.
    Raises as `load_run`.
    """
    return load_typed(Typed(tuple(overrides)), world_size)


def load_typed(typed: Typed, world_size: int | None = None) -> Run:
    """The checked run that arguments of train.py describe.

    Raises as `load_run`, and what composing raises.
    """
    register_schema()
    with typed.looked_up():
        settle_saved(typed, world_size)
        name = typed.config_name or CONFIG_NAME
        return load_run(compose(name, list(typed.overrides)), world_size)


def _refuse_unknown(config: DictConfig) -> None:
    # Hydra lets `+key=value` add what the schema does not have.
    known = set(all_keys())
    for key in _present(config, ""):
        if key not in known:
            raise ConfigError(
                key, OmegaConf.select(config, key), "there is no such key", guess=like_key(key)
            )


def _refuse_secrets(config: DictConfig) -> None:
    # What they resolve to would be written into the run folder, and be sent to Weights & Biases.
    for key, text in _as_typed(OmegaConf.to_container(config, resolve=False), ""):
        for variable in filter(_is_secret, _FROM_ENVIRONMENT.findall(text)):
            rule = f"what {variable} holds would be written into the run folder"
            raise ConfigError(key, text, rule, advice="leave it in the environment")


def _is_secret(variable: str) -> bool:
    """Whether an environment variable holds a key or password, by its name."""
    parts = variable.upper().split("_")
    last = parts[-1]
    return (
        "KEY" in parts
        or last.endswith("KEY")
        or last in ("PASS", "PAT")
        or any(part.endswith(_SECRETS) for part in parts)
    )


def _as_typed(values: object, key: str) -> Iterator[tuple[str, str]]:
    """Dotted key and text of every string, as it was before interpolations were resolved."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from _as_typed(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        for value in values:
            yield from _as_typed(value, key)
    elif isinstance(values, str):
        yield key, values


def _present(node: DictConfig, prefix: str) -> Iterator[str]:
    for key in node:
        name = prefix + str(key)
        yield name
        child = node._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _present(child, f"{name}.")


def all_keys() -> list[str]:
    """Every dotted key of the configuration, sections included."""
    return list(_keys(Run, ""))


def like_key(word: str) -> str | None:
    """The key that a word may be a slip of: one with the same letters, else the shortest of its
    section that goes on where it ends, else one that ends in it, else one that is spelt like it.
    """
    keys = all_keys()
    letters = word.replace("_", "")
    same = [key for key in keys if key.replace("_", "") == letters]
    longer = [key for key in keys if key.startswith(f"{word}_")]
    ends = [key for key in keys if key.rpartition(".")[2] == word.rpartition(".")[2]]
    near = nearest(word, ends) or (ends[0] if len(ends) == 1 else None)
    return next(iter(same), min(longer, key=len, default=near)) or nearest(word, keys)


def _keys(section: type, prefix: str) -> Iterator[str]:
    for name, hint in typing.get_type_hints(section).items():
        yield prefix + name
        for kind in (k for k in (hint, *typing.get_args(hint)) if k is not NoneType):
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from _keys(kind, f"{prefix}{name}.")


def type_of(key: str) -> Any:
    """The annotation of a dotted key, None for what is no key."""
    section: Any = Run
    for name in key.split("."):
        hints = typing.get_type_hints(section) if dataclasses.is_dataclass(section) else {}
        hint = hints.get(name)
        kinds = [kind for kind in typing.get_args(hint) if dataclasses.is_dataclass(kind)]
        section = kinds[0] if kinds else hint
    return section


def default_of(key: str) -> object:
    """The default of a dotted key, None where it has none."""
    section: object = _defaults()
    for name in key.split("."):
        section = getattr(section, name, None)
    return section.value if isinstance(section, Enum) else section
