"""Keys missing from a config.json get the defaults of `transformers`' configuration class."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.config import ModelConfig
from app.errors import ConfigError
from app.hf.families import differences
from app.hf.file_names import CONFIG_JSON
from app.hf.supported import FAMILIES
from app.hf.their_model import TheirModel
from scripts.hugging_face_keys import config_class
from tests import hf_folders
from tests.hf_folders import KEY, transformers
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_spellings import config_of_4

# their configuration, without which the rest says nothing
KIND = "model_type"
YARN = {"original_max_position_embeddings": 32, "rope_theta": 5e4}


def read(values: dict[str, Any], folder: Path) -> ModelConfig | str:
    """The model of a config.json, or what is said of it."""
    (folder / CONFIG_JSON).write_text(json.dumps(values))
    try:
        return TheirModel.read(folder, KEY).model
    except ConfigError as error:
        return str(error)


def lacking(values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Without a key, and with null for it, each key in turn, also of sections."""
    for key, value in values.items():
        if key != KIND:
            yield f"no {key}", {name: each for name, each in values.items() if name != key}
            yield f"{key}=null", {**values, key: None}
        if isinstance(value, dict) and key in ("rope_parameters", "rope_scaling"):
            yield from ((f"{key}: {what}", {**values, key: some}) for what, some in lacking(value))


def unlike(one: ModelConfig, other: ModelConfig) -> list[Any]:
    found: list[Any] = list(differences(one, other))
    losses = [model.moe and model.moe.aux_loss_coeff for model in (one, other)]
    return found + ([losses] if losses[0] != losses[1] else [])


@pytest.mark.every(18)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", hf_folders.FAMILIES)
def test_a_missing_key_is_what_transformers_takes(name: str, tmp_path: Path):
    """Or it is refused; so is what `transformers` completes to a model that is none of ours."""
    transformers.logging.set_verbosity_error()
    _, theirs, _ = CASES[hf_folders.FAMILIES[name]]()
    new = theirs.to_dict()
    same = 0
    for values in (new, config_of_4(copy.deepcopy(new))):
        for what, some in lacking(values):
            found = read(some, tmp_path)
            try:
                whole = type(theirs).from_dict(copy.deepcopy(some)).to_dict()
            except Exception as error:  # of several libraries
                # EXAONE-4 without windows and layer_types divides by the interval that it sets to 0
                fails = isinstance(error, KeyError | ZeroDivisionError)
                refused = fails or "Validation" in type(error).__name__
                assert refused, what  # by them, and we may
                continue
            expected = read(whole, tmp_path)
            if isinstance(found, ModelConfig):
                assert isinstance(expected, ModelConfig), (what, expected)
                assert unlike(found, expected) == [], what
                same += 1
            elif isinstance(expected, ModelConfig):
                assert found.endswith((" is missing", "both count or none")), found
    assert same > 50


@pytest.mark.filterwarnings("ignore")
def test_of_two_sections_of_positions_the_same_one_counts(tmp_path: Path):
    _, theirs, _ = CASES["llama-3.1"]()
    both = {**theirs.to_dict(), "rope_scaling": {"type": "yarn", "factor": 2.0, **YARN}}
    whole = type(theirs).from_dict(copy.deepcopy(both)).to_dict()
    found, expected = read(both, tmp_path), read(whole, tmp_path)
    assert isinstance(found, ModelConfig) and isinstance(expected, ModelConfig)
    assert found.yarn is not None and unlike(found, expected) == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_defaults_are_those_of_the_class(family: Any):
    """The numbers one by one, too: above, several could stand for the same model."""
    theirs = config_class(family.model_type)()
    rotary = theirs.rope_parameters
    rotary = rotary.get("full_attention", rotary)
    values = {**rotary, **theirs.to_dict(), "rope_theta": rotary["rope_theta"]}
    if "sliding_window" in family.defaults:
        values["sliding_window"] = type(theirs).sliding_window  # dropped where it is not used
    usual = {"rope_theta": 10000.0}
    assert {name: values[name] for name in family.defaults} == dict(family.defaults)
    assert {**usual, **family.defaults}["rope_theta"] == values["rope_theta"]
    assert not family.behind.lines or family.behind.usual == values["num_nextn_predict_layers"]
