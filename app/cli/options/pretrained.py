"""Sizes of a model that starts from Hugging Face weights: filled in or checked by config.json."""

from __future__ import annotations

from enum import Enum

from omegaconf import DictConfig, ListConfig, OmegaConf

from app.config import ModelConfig, MoEConfig, Run
from app.config.model import SCALINGS
from app.errors import ConfigError, Instead, typed
from app.hf.families import OF_EXPERTS, differences
from app.hf.hub import config_folder
from app.hf.their_model import TheirModel

KEY = "model.init_from"
PRESET = "model=pretrained"
OF_CONFIG_JSON = "${config_json:"  # how presets leave a key to config.json
OF_KINDS = ("mla", "linear_attention", *SCALINGS)  # sections that few models have


def of_config_json(field: str, _root_: DictConfig) -> object:
    """Resolve `${config_json:num_layers}` where a composed configuration is shown.

    What is said of experts that a model lacks is the default: a reference cannot be left out.
    """
    found = _their_model(_root_.model)
    section, _, name = field.rpartition(".")
    if section:
        assert section == "moe", f"{field} is in no preset"
    value = getattr(found.moe or MoEConfig() if section else found, name)
    if not isinstance(value, tuple):
        return value
    return ListConfig([each.value if isinstance(each, Enum) else each for each in value])


def _their_model(model: DictConfig, asks_hub: bool = True) -> ModelConfig:
    if model.init_from is None:
        rule = f"{PRESET} leaves sizes to the config.json of a Hugging Face model"
        raise ConfigError(KEY, None, rule, advice="name its folder, or its name on the hub")
    return TheirModel.read(config_folder(model.init_from, KEY, asks=asks_hub), KEY).model


def adopt(model: DictConfig, asks_hub: bool) -> ModelConfig | None:
    """Fill in what a composed section `model` leaves to config.json; return the model that the file
    describes, None if none is named.

    `asks_hub`: as `load_run`. Raises ConfigError.
    """
    left = _left(model)
    if model.init_from is None and not left:
        return None
    found = _their_model(model, asks_hub)
    # a section that is null has no key that could be left to a file
    kinds = [name for name in OF_KINDS if left and model[name] is None]
    for name in (*left, *kinds):
        model[name] = getattr(found, name)
    if found.moe is None and model.moe is not None and _asks_for_none(model.moe):
        model.moe = None
    elif model.moe is not None:
        usual = found.moe or MoEConfig()
        for name in _left(model.moe):
            model.moe[name] = getattr(usual, name)
    return found


def _left(section: DictConfig) -> list[str]:
    """Return the keys of a section that are left to config.json."""
    values = OmegaConf.to_container(section, resolve=False)
    assert isinstance(values, dict)
    return [str(key) for key, value in values.items() if str(value).startswith(OF_CONFIG_JSON)]


def _asks_for_none(moe: DictConfig) -> bool:
    """Return whether a section `moe` leaves all keys of OF_EXPERTS to config.json."""
    return set(OF_EXPERTS) <= set(_left(moe))


def check_agreement(run: Run, found: ModelConfig) -> None:
    """Raise ConfigError where a run's model is not the one of its config.json. How many layers
    there are behind the decoder's is a matter of the files.
    """
    for field, ours, theirs in differences(run.model, found.with_behind(run.model)):
        rule = f"{run.model.init_from} has {typed(theirs)} in its config.json"
        raise ConfigError(f"model.{field}", ours, rule, nearest=(theirs, Instead(PRESET)))
    ours_moe, theirs_moe = run.model.moe, found.moe
    if ours_moe and theirs_moe and theirs_moe.bias_update_rate and not ours_moe.bias_update_rate:
        rule = f"would leave out the biases that the routers of {run.model.init_from} have learnt"
        raise ConfigError(
            "model.moe.bias_update_rate", 0.0, rule, nearest=theirs_moe.bias_update_rate
        )
