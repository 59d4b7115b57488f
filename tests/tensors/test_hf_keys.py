"""Every key of config.json that `transformers` knows is read, has to be neutral, or cannot change
logits: by the installed version's classes and sources, and by what its models compute.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.errors import ConfigError
from app.hf import config_keys
from app.hf.file_names import CONFIG_JSON
from app.hf.pretrained import Pretrained
from scripts import hugging_face_keys
from scripts.hugging_face_keys import PAGE, TYPES, config_class, keys_known, page, rule
from tests.hf_folders import (
    KEY,
    edit_config,
    edit_tensors,
    loaded,
    save_random,
    transformers,
)
from tests.tensors.hf_spellings import config_of_4
from tests.tensors.models import draw_tokens, forward

SOURCES = ("cache_utils", "masking_utils", "modeling_rope_utils", "integrations.moe")
ATTRIBUTE = re.compile(r"\bconfig\.([a-z_]\w+)|getattr\((?:\w+\.)*config, \"(\w+)\"")
COMMENT = re.compile(r"^ *#.*$", re.MULTILINE)
# Keys of images, in sources that have the model of texts too.
OF_QWEN_IMAGES = {
    "depth", "image_token_id", "in_channels", "num_heads", "num_position_embeddings",
    "out_hidden_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "video_token_id",
    "vision_config",
}  # fmt: skip
OF_IMAGES = {
    "gemma3_text": {"image_token_id", "mm_tokens_per_image", "vision_config"},
    "qwen3_5_text": OF_QWEN_IMAGES,
    "qwen3_5_moe_text": {*OF_QWEN_IMAGES, "intermediate_size"},
}
EPSILONS = {
    "cohere2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "nemotron": "norm_eps",
    "gpt_neox": "layer_norm_eps",
}
# What sources take from a configuration that no file sets: methods, and the module `json`'s file.
NO_KEYS = frozenset(("get_text_config", "json", "standardize_rope_params", "validate_rope"))


def unruled(model_type: str) -> list[str]:
    return sorted(key for key in keys_known(model_type) if rule(model_type, key) is None)


@pytest.mark.parametrize("model_type", TYPES)
def test_every_key_of_a_class_has_a_rule(model_type: str):
    assert unruled(model_type) == []
    assert len(keys_known(model_type)) > 90


@pytest.mark.parametrize("model_type", TYPES)
def test_every_key_in_the_sources_has_a_rule(model_type: str):
    """Includes keys that no class declares, such as `is_causal`."""
    named = config_class(model_type).model_type.removesuffix("_text")
    model = f"models.{named}.modeling_{named}"
    found = set()
    for name in (model, *SOURCES):
        text = Path(str(import_module(f"transformers.{name}").__file__)).read_text()
        text = COMMENT.sub("", text)
        found |= {one or other for one, other in ATTRIBUTE.findall(text)}
    epsilon = EPSILONS.get(model_type, "rms_norm_eps")
    assert {"is_causal", epsilon, "attention_chunk_size"} <= found
    others = OF_IMAGES.get(model_type, set())
    assert sorted(key for key in found - NO_KEYS - others if rule(model_type, key) is None) == []


def test_a_new_key_of_a_class_is_found(monkeypatch: pytest.MonkeyPatch):
    class Newer(config_class("llama")):  # type: ignore[misc]
        residual_scale: float = 1.0

    monkeypatch.setattr(hugging_face_keys, "config_class", lambda _: Newer)
    assert unruled("llama") == ["residual_scale"]


def test_no_key_has_two_rules():
    tables = (config_keys.NEUTRAL, config_keys.WITHOUT_EFFECT, config_keys.NOT_APPLIED)
    assert sum(map(len, tables)) == len({key for table in tables for key in table})
    listed = [key for keys in config_keys.REASONS.values() for key in keys]
    assert len(listed) == len(set(listed))


def test_keys_of_rotary_positions_are_those_of_transformers():
    from transformers.modeling_rope_utils import RopeParameters

    assert RopeParameters.__annotations__.keys() | {"type"} == config_keys.ROTARY


def test_the_page_has_the_table():
    """scripts/hugging_face_keys.py writes it."""
    assert PAGE.read_text() == page()


# What a key is changed to, besides its double, half and neighbours where it is a number.
VALUES = (True, False, 0, 1, 2, 0.5, 0.01, "x", "sigmoid", "gelu", [], {}, None)
DEFAULT = {"rope_type": "default", "rope_theta": 1e3}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "beta_fast": 1.5, "beta_slow": 0.2,
        "original_max_position_embeddings": 16}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e3, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}  # fmt: skip
SECTIONS = {"default": DEFAULT, "yarn": YARN, "llama3": LLAMA3}


def edits(config: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """Configurations with other values of a key, or of one of a rotary section, `yarn.factor`."""
    kind, _, name = key.rpartition(".")
    section = SECTIONS.get(kind, {}) | ({"mscale": 0.7, "mscale_all_dim": 0.8}
        if kind == "yarn" and "kv_lora_rank" in config else {})  # fmt: skip
    held = (section or config).get(name)
    number = isinstance(held, int | float) and not isinstance(held, bool)
    more = (held * 2, held / 2, held + 1, held - 1) if number else ()
    more += (8, *SECTIONS) if section else ()
    if section and name != "attention_factor":  # by whose square scores, and rounding, would grow
        more += (16, 24, 64)
    for value in (*VALUES, *more):
        if not section:
            yield {**config, key: value}
            continue
        edited = {**config, "rope_parameters": {**section, name: value}}
        yield edited
        if {"rope_type", "rope_theta"} <= edited["rope_parameters"].keys():
            yield config_of_4(dict(edited))
        if name == "original_max_position_embeddings":  # beside the section
            yield {**config, "rope_parameters": section, name: value}


def keys_changed(model_type: str) -> list[str]:
    rotary = [f"{kind}.{name}" for kind in SECTIONS for name in sorted(config_keys.ROTARY)]
    keys = {key for key in keys_known(model_type) | config_keys.NEUTRAL.keys()
            if key not in ("model_type", "rope_parameters", "rope_scaling")
            and "implementation" not in key}  # fmt: skip
    return [*sorted(keys), *rotary]


QUICK = [
    ("llama", "is_causal"),
    ("llama", "yarn.original_max_position_embeddings"),
    ("mixtral", "num_experts_per_tok"),
    ("qwen3_moe", "sliding_window"),
    ("ministral", "sliding_window"),
    ("qwen3_moe", "num_experts_per_tok"),
    ("deepseek_v3", "norm_topk_prob"),
    ("deepseek_v3", "llama3.mscale_all_dim"),
]
PARTS = 16  # of the keys of a type, each a case


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each type, made when it is first asked for."""
    return {"": tmp_path_factory.mktemp("keys")}


def folder_of(folders: dict[str, Path], model_type: str) -> Path:
    if model_type not in folders:
        folders[model_type] = folders[""] / model_type
        save_random(model_type, folders[model_type])
        shutil.copy(folders[model_type] / CONFIG_JSON, folders[model_type] / "plain.json")
    return folders[model_type]


@torch.no_grad()
def theirs_of(folder: Path, tokens: Tensor) -> Tensor | None:
    """Logits of `transformers`; None where it cannot compute them."""
    usual = {"dtype": torch.float32, "attn_implementation": "eager"}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **usual)
        logits: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    except Exception:  # of several libraries
        return None
    return logits


@torch.no_grad()
def check_values(model_type: str, key: str, folders: dict[str, Path]) -> None:
    """Logits are those of `transformers` with the same config.json, whatever a key has."""
    transformers.logging.set_verbosity(50)
    folder = folder_of(folders, model_type)
    shutil.copy(folder / "plain.json", folder / CONFIG_JSON)
    # with these tokens no two experts or groups are so close that rounding chooses between them
    tokens = draw_tokens(loaded(folder).model, 2, 40, seed=2)
    for config in edits(json.loads((folder / "plain.json").read_text()), key):
        (folder / CONFIG_JSON).write_text(json.dumps(config))
        try:
            ours = forward(loaded(folder), tokens).x
        except ConfigError:
            continue
        theirs = theirs_of(folder, tokens)
        if theirs is not None:
            shown = {name: config.get(name) for name in (key, "rope_parameters", "rope_scaling")}
            assert torch.allclose(ours, theirs, atol=2e-3, rtol=2e-3), (model_type, shown)


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "key"), QUICK)
def test_a_value_is_computed_with_or_refused(model_type: str, key: str, folders: dict[str, Path]):
    assert key in keys_changed(model_type)
    check_values(model_type, key, folders)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("model_type", TYPES)
def test_values_of_every_key(model_type: str, part: int, folders: dict[str, Path]):
    """Which keys there are, `transformers` says; each is in one of the parts."""
    for key in keys_changed(model_type)[part::PARTS]:
        check_values(model_type, key, folders)


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    save_random("deepseek_v3", tmp_path)
    return tmp_path


def add_layer(folder: Path, *tensors: str) -> None:
    """Add tensors of a layer behind the last one."""
    more = {f"model.layers.3.{name}.weight": torch.ones(2) for name in tensors}
    edit_tensors(folder, lambda held: held.update(more))


def test_what_is_left_out_is_one_line(deepseek: Path):
    assert Pretrained(deepseek, KEY).left_out() is None
    add_layer(deepseek, "eh_proj", "enorm")
    edit_config(deepseek, num_mtp_layers=1, num_nextn_predict_layers=..., unsloth_fixed=True,
                attention_dropout=0.1, foo=None)  # fmt: skip
    assert Pretrained(deepseek, KEY).left_out() == (
        "left out: model.layers.3, which predicts further tokens; config.json: unsloth_fixed, "
        "which models of type deepseek_v3 do not use; config.json: attention_dropout=0.1, as no "
        "such noise is applied in training"
    )


def test_prediction_layer_of_glm4_moe_is_left_out(tmp_path: Path):
    save_random("glm4_moe", tmp_path)
    add_layer(tmp_path, "eh_proj", "enorm", "shared_head.head")
    told = "left out: model.layers.3, which predicts further tokens"
    assert Pretrained(tmp_path, KEY).left_out() == told


def test_prediction_block_of_ernie_is_left_out(tmp_path: Path):
    save_random("ernie4_5_moe", tmp_path)
    more = {f"model.mtp_{name}.0.weight": torch.ones(2) for name in ("emb_norm", "linear_proj")}
    edit_tensors(tmp_path, lambda held: held.update(more))
    edit_config(tmp_path, num_nextn_predict_layers=1)
    told = "left out: model.mtp_*, which predicts further tokens"
    assert Pretrained(tmp_path, KEY).left_out() == told


def test_a_decoder_layer_is_not_left_out(deepseek: Path):
    """Only one with what a layer has that predicts further tokens."""
    add_layer(deepseek, "input_layernorm")
    edit_config(deepseek, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.input_layernorm\.weight is unknown"):
        loaded(deepseek)


def test_two_numbers_of_one_thing_are_refused(deepseek: Path):
    edit_config(deepseek, num_local_experts=8)
    with pytest.raises(ConfigError, match="=16 and num_local_experts=8 must be equal"):
        loaded(deepseek)


def test_code_of_its_own_is_named_and_with_keys_refused(deepseek: Path):
    code = {"AutoModelForCausalLM": "modeling.Model"}
    edit_config(deepseek, auto_map=code)
    said = "left out: config.json: auto_map, as code that comes with a model is not run"
    assert Pretrained(deepseek, KEY).left_out() == said
    edit_config(deepseek, logit_scale=0.5)
    with pytest.raises(ConfigError, match="logit_scale may mean something to the code"):
        loaded(deepseek)
    edit_config(deepseek, auto_map=...)
    assert "logit_scale, which models of type" in str(Pretrained(deepseek, KEY).left_out())


def test_latent_keys_in_another_family_do_not_count(tmp_path: Path):
    save_random("llama", tmp_path)
    edit_config(
        tmp_path, kv_lora_rank=4, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    )
    with pytest.raises(ConfigError, match="leaves out of its softmax"):
        loaded(tmp_path)


def test_a_value_of_the_epsilon_of_latents_is_read(deepseek: Path):
    for eps, own in ((1e-6, None), (1e-3, 1e-6)):
        edit_config(deepseek, rms_norm_eps=eps)
        model = loaded(deepseek).model
        assert model.mla is not None and model.mla.norm_eps == own
        assert (model.norm_eps, model.latent_eps) == (eps, 1e-6)
        changed = dataclasses.replace(model, mla=dataclasses.replace(model.mla, norm_eps=eps))
        assert changed.latent_eps == eps
