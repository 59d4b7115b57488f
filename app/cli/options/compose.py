"""Compose YAML and overrides by Hydra into the frozen `Run`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from app.advice.elastic import laid_out
from app.cli.options.arguments import CONFIG_NAME, Typed, key_of
from app.cli.options.continued import RunSettings
from app.cli.options.keys import all_keys, defaults, is_section
from app.cli.options.old_names import read_files_by_present_names, with_present_names
from app.cli.options.pretrained import adopt, check_agreement, of_config_json
from app.cli.options.unknown import no_such_key
from app.cli.options.vocabulary import fill_in_vocabulary, ids_of_tokenizer
from app.config import Run
from app.config.renamed import new_key, removed
from app.data.paths import local_files
from app.data.tokenizer_files import tokenizer_file
from app.errors import ConfigError, Instead
from app.errors import typed as as_typed
from app.hf.families import family_of
from app.rules import check

ELASTIC = Instead("parallel.elastic=true")  # advice where a launcher has started other ranks
SAVED = "saved_run"  # in conf/train.yaml's list: settings of a run that is continued
BYTES = "bytes"  # the tokenizer that is no file
# hydra_plugins/
OUR_PLUGINS = {
    "hydra/launcher": ("torchrun", "TorchrunLauncher"),
    "hydra/sweeper": ("grid", "GridSweeper"),
}
_FROM_ENVIRONMENT = re.compile(r"\boc\.env:\s*([A-Za-z_]\w*)")
_SECRETS = ("APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL",
            "CREDENTIALS")  # fmt: skip


def register_schema() -> None:
    """Make the types of `Run` the schema that every YAML file and override is checked against,
    and name our plugins, and what presets refer to.
    """
    read_files_by_present_names()
    if "run_schema.yaml" not in ConfigStore.instance().repo:  # the same for every composition
        ConfigStore.instance().store(name="run_schema", node=run_schema())
    ConfigStore.instance().store(name=SAVED, node={})
    OmegaConf.register_new_resolver("config_json", of_config_json, replace=True)
    OmegaConf.register_new_resolver("ids_of_tokenizer", ids_of_tokenizer, replace=True)
    for group, (option, plugin) in OUR_PLUGINS.items():
        ConfigStore.instance().store(
            group=group, name=option, node={"_target_": f"hydra_plugins.graphfold.{plugin}"}
        )


def settle_saved(typed: Typed, world_size: int | None) -> None:
    """Store the settings of the run that these arguments continue, for later compositions to start
    from. Call it within `typed.looked_up()`, after `register_schema`.
    """
    saved = RunSettings.of(typed)
    node = {} if saved is None else saved.beside(typed, all_keys(), world_size)
    ConfigStore.instance().store(name=SAVED, node=node)


def settings_line(typed: Typed) -> str | None:
    """Return the line about the saved settings that a run continues with; None for a new run."""
    saved = RunSettings.of(typed)
    if saved is None:
        return None
    unknown = saved.unknown(all_keys())
    left = f"without keys that this version lacks: {', '.join(unknown)}"
    parts = (f"of {saved.file}", "what is typed counts over them", *saved.renamed)
    return "; ".join((*parts, left) if unknown else parts)


def run_schema() -> DictConfig:
    """Return `Run` with its defaults as the typed configuration that YAML files merge into."""
    schema = OmegaConf.structured(defaults())
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
    if world_size is not None and not config.parallel.elastic:
        if asked not in (None, world_size):
            raise ConfigError(
                "parallel.world_size",
                asked,
                f"the launcher started {world_size} processes",
                nearest=(world_size, ELASTIC),
            )
        config.parallel.world_size = world_size
    _refuse_unknown(config)
    _refuse_secrets(config)
    pretrained = adopt(config.model, asks_hub)
    fill_in_vocabulary(config, asks_hub)
    run = OmegaConf.to_object(config)
    assert isinstance(run, Run)
    run = laid_out(run, world_size)
    if pretrained is not None:
        check_agreement(run, pretrained)
    if run.checkpoint.export_hf:
        family_of(run.model, "checkpoint.export_hf", True)
    try:
        return check(run)
    except ConfigError as error:
        if world_size is None or error.key not in ("parallel.dp", "parallel.world_size"):
            raise
        raise error.with_guesses((*error.alternatives, ELASTIC)) from None


def load_overrides(overrides: Sequence[str], world_size: int | None = None) -> Run:
    """Return the checked run of these overrides, whatever the working directory. Raises as
    `load_run`.
    """
    return load_typed(Typed(tuple(overrides)), world_size)


def refuse_deletions(typed: Typed) -> None:
    """Raise ConfigError for `~name`: every run has all groups and keys, and defaults that nobody
    looked at would take their place.
    """
    for word in typed.overrides:
        if word.startswith("~") and not word.startswith("~hydra"):
            rule = "takes away a section that every run has"
            if "." in word:
                rule = "takes away a key that every run has"
            raise ConfigError("override", word, rule, advice="leave it away")
        _refuse_section(word)


def _refuse_section(word: str) -> None:
    """Raise ConfigError for a dictionary as the value of a section: where the section is null, it
    would be ignored, or OmegaConf would fail.
    """
    key, _, value = word.partition("=")
    key = key.lstrip("+")
    if not (value.startswith("{") and "." in key and is_section(key)):
        return
    (override,) = OverridesParser.create().parse_overrides([word])
    given = override.value()
    assert isinstance(given, dict), "the value begins with a brace"
    if any(new_key(name) != name or removed(name) for name in (f"{key}.{each}" for each in given)):
        return  # composing explains names of earlier versions
    keys = " ".join(f"{key}.{name}={as_typed(each)}" for name, each in given.items())
    rule = "is a section, whose keys are given one by one"
    raise ConfigError(key, value, rule, advice=f"type {keys}" if keys else None)


def load_typed(typed: Typed, world_size: int | None = None) -> Run:
    """Return the checked run of these arguments.

    Raises as `load_run`, and what composing raises.
    """
    register_schema()
    typed = dataclasses.replace(typed, overrides=with_present_names(typed.overrides))
    refuse_deletions(typed)
    with typed.looked_up():
        settle_saved(typed, world_size)
        name = typed.config_name or CONFIG_NAME
        return load_run(compose(name, list(typed.overrides)), world_size)


def _refuse_unknown(config: DictConfig) -> None:
    # Hydra lets `+key=value` add what the schema does not have.
    known = set(all_keys())
    for key in _present(config, ""):
        if key not in known:
            raise no_such_key(key, as_typed(OmegaConf.select(config, key)))


def _refuse_secrets(config: DictConfig) -> None:
    # What they resolve to would be written into the run folder, and be sent to Weights & Biases.
    for key, text in _as_typed(OmegaConf.to_container(config, resolve=False), ""):
        for variable in filter(_is_secret, _FROM_ENVIRONMENT.findall(text)):
            rule = f"what {variable} holds would be written into the run folder"
            raise ConfigError(key, text, rule, advice="leave it in the environment")


def _is_secret(variable: str) -> bool:
    """Return whether the name of an environment variable is that of a key or password."""
    parts = variable.upper().split("_")
    last = parts[-1]
    return (
        "KEY" in parts
        or last.endswith("KEY")
        or last in ("PASS", "PAT")
        or any(part.endswith(_SECRETS) for part in parts)
    )


def _as_typed(values: object, key: str) -> Iterator[tuple[str, str]]:
    """Yield dotted key and text of every string, with interpolations unresolved."""
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


def check_named(run: Run, overrides: Sequence[str]) -> None:
    """Raise ConfigError if one of these overrides names missing files or a dataset of the hub: a
    hint must not offer what nobody has looked up.
    """
    keys = {key_of(word) for word in overrides}
    tokenizer, resume = run.data.tokenizer, run.resume
    if "data.tokenizer" in keys and tokenizer != BYTES:
        tokenizer_file(tokenizer)
    if "data.path" in keys and run.data.path:
        local_files(run.data)
    if "data.name" in keys and not Path(run.data.name or "").is_dir():
        raise ConfigError("data.name", run.data.name, "is on the hub")
    if "resume" in keys and resume not in (None, "auto") and not Path(resume).exists():
        raise ConfigError("resume", resume, "does not exist")
