"""Errors in the folder of a Hugging Face model give one line, with file and tensor."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.errors import ConfigError
from app.hf.file_names import INDEX
from app.hf.pretrained import Pretrained
from app.hf.their_model import TheirModel
from tests.hf_folders import (
    FAMILIES,
    KEY,
    edit_config,
    edit_tensors,
    loaded,
    save_random,
    split_into_two,
)

FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json",
    ),
    "config cut": (
        lambda folder: (folder / "config.json").write_text('{"model_type":'),
        "config.json cannot be read: Expecting value: line 1 column 15 (char 14)",
    ),
    "another family": (
        lambda folder: edit_config(folder, model_type="gemma3"),
        "config.json: models of type gemma3 are not supported; docs/hugging-face-keys.md has a "
        "table of those that are",
    ),
    "a family that is spelt like another": (
        lambda folder: edit_config(folder, model_type="qwen2_vl"),
        "config.json: models of type qwen2_vl are not supported; docs/hugging-face-keys.md has a "
        "table of those that are",
    ),
    "not causal": (
        lambda folder: edit_config(folder, is_causal=False),
        "config.json: is_causal=false is not supported",
    ),
    "causal by nothing": (  # which `transformers` takes for false
        lambda folder: edit_config(folder, is_causal=None),
        "config.json: is_causal=null is not supported",
    ),
    "keys of other rotary positions": (
        lambda folder: edit_config(
            folder, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}
        ),
        "config.json: rope_parameters.factor=2.0 is not used by rotary positions of type default",
    ),
    "layer types of other layers": (
        lambda folder: edit_config(folder, layer_types=["full_attention"]),
        "config.json: layer_types has 1 of num_hidden_layers=3",
    ),
    "no layers": (
        lambda folder: edit_config(folder, num_hidden_layers=...),
        "config.json: num_hidden_layers is missing",
    ),
    "impossible": (
        lambda folder: edit_config(folder, num_key_value_heads=5),
        "config.json: as model.num_kv_heads=5: must divide num_heads=6",
    ),
    "another activation": (
        lambda folder: edit_config(folder, hidden_act="gelu"),
        'config.json: hidden_act="gelu" is not supported',
    ),
    "other positions": (
        lambda folder: edit_config(folder, rope_parameters={"rope_type": "proportional"}),
        "config.json: rotary positions of type proportional are not supported",
    ),
    "half a softmax scale": (
        lambda folder: edit_config(
            folder,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.5,
            },
        ),
        "config.json: YaRN with one of mscale and mscale_all_dim, of which both count or none",
    ),
    "a word for a number": (
        lambda folder: edit_config(folder, num_hidden_layers="3"),
        'config.json: num_hidden_layers="3" is no whole number',
    ),
    "a number for a section": (
        lambda folder: edit_config(folder, rope_parameters=1e6),
        "config.json: rope_parameters=1000000.0 is no section",
    ),
    "other quantisation": (
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq"}),
        "config.json: weights quantised by gptq are not supported, only fp8, compressed-tensors "
        "in FP8 and mxfp4; name the model that it was quantised from, or save it with its weights "
        "in 16 bits",
    ),
    "a word in a section": (
        lambda folder: edit_config(folder, rope_scaling={"rope_type": "yarn", "factor": "8"}),
        'config.json: rope_scaling.factor="8" is no number',
    ),
    "a list in a section": (
        lambda folder: edit_config(
            folder, rope_parameters={"rope_type": "llama3", "low_freq_factor": [1] * 99}
        ),
        "config.json: rope_parameters.low_freq_factor=[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, "
        "1, 1, 1, 1, 1, 1,… is no number",
    ),
    "a section that lacks a number": (
        lambda folder: edit_config(folder, rope_scaling={"type": "llama3", "factor": 8}),
        "config.json: rope_scaling.low_freq_factor is missing",
    ),
    "a length that is nowhere": (
        lambda folder: edit_config(
            folder,
            rope_scaling={"type": "yarn", "factor": 8},
            max_position_embeddings=...,
        ),
        "config.json: rope_scaling.original_max_position_embeddings is missing",
    ),
    "a part of every head": (
        lambda folder: edit_config(
            folder, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
        ),
        "config.json: rope_parameters.partial_rotary_factor=0.5 is not supported",
    ),
    "positions by kind of layer": (
        lambda folder: edit_config(
            folder, rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 4.0}}
        ),
        "config.json: rope_parameters.full_attention is a section: other positions in some layers",
    ),
    "blocks of one number": (
        lambda folder: edit_config(
            folder, quantization_config={"quant_method": "fp8", "weight_block_size": 128}
        ),
        "config.json: quantization_config.weight_block_size=128 is no list of whole numbers",
    ),
    "blocks without rows": (
        lambda folder: edit_config(
            folder, quantization_config={"quant_method": "fp8", "weight_block_size": [0, 128]}
        ),
        "config.json: quantization_config.weight_block_size=[0, 128] is not supported",
    ),
    "an unknown way": (
        lambda folder: edit_config(folder, quantization_config={"bits": 4}),
        "config.json: quantization_config.quant_method is missing",
    ),
    "truncated": (
        lambda folder: shorten(folder / "model.safetensors"),
        "model.safetensors is truncated or no safetensors file: Error while deserializing header: "
        "incomplete metadata, file not fully covered",
    ),
    "a pointer": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
        ),
        "model.safetensors is a pointer of git-lfs in the place of the file; git lfs pull "
        "brings it",
    ),
    "an adapter": (
        lambda folder: (folder / "model.safetensors").rename(folder / "adapter_model.safetensors"),
        "has neither model.safetensors nor model.safetensors.index.json, but "
        "adapter_model.safetensors",
    ),
    "config deep": (
        lambda folder: (folder / "config.json").write_text("[" * 100_000),
        "config.json cannot be read: maximum recursion depth exceeded while decoding a JSON array "
        "from a unicode string",
    ),
    "config a folder": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
        "config.json cannot be read: Is a directory",
    ),
    "a tensor in two files": (
        lambda folder: (split_into_two(folder), add_to_first(folder)),
        "model.norm.weight is in model-00001-of-00002.safetensors, and "
        "model.safetensors.index.json says in model-00002-of-00002.safetensors",
    ),
    "a head of its own": (
        lambda folder: edit_config(folder, tie_word_embeddings=True),
        "lm_head.weight differs from model.embed_tokens.weight in row 0, and "
        "tie_word_embeddings makes them one",
    ),
    "a head with one row of its own": (
        lambda folder: (
            edit_config(folder, tie_word_embeddings=True),
            edit_tensors(folder, lambda tensors: tie_but_for(tensors, row=94)),
        ),
        "lm_head.weight differs from model.embed_tokens.weight in row 94, and "
        "tie_word_embeddings makes them one",
    ),
    "another file by the name of pickles": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "pytorch_model.bin is truncated or no file of torch.save: File is not a zip file",
    ),
    "nothing": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "a missing tensor": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight")
        ),
        "model.layers.1.self_attn.k_norm.weight is missing from the files",
    ),
    "an unknown tensor": (
        lambda folder: edit_tensors(
            folder, lambda tensors: tensors.update({"model.layers.1.lora_A": torch.ones(3)})
        ),
        "model.layers.1.lora_A is unknown in models of type qwen3",
    ),
    "another shape": (
        lambda folder: edit_config(folder, vocab_size=80),
        "model.safetensors: model.embed_tokens.weight has the shape [96, 32] instead of [80, 32]",
    ),
    "another type": (
        lambda folder: edit_tensors(
            folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].long()})
        ),
        "model.safetensors: model.norm.weight is of type I64, not F32, BF16, F16, F8_E4M3",
    ),
    "fp8 without scales": (
        lambda folder: edit_tensors(
            folder,
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
        ),
        "model.safetensors: lm_head.weight is of type F8_E4M3 without weight_scale_inv",
    ),
    "a missing shard": (
        lambda folder: (split_into_two(folder), second(folder).unlink()),
        "model-00002-of-00002.safetensors is missing, which has "
        "model.layers.1.self_attn.k_norm.weight",
    ),
    "an index that names another file": (
        lambda folder: (split_into_two(folder), exchange(folder)),
        "model.norm.weight is in model-00002-of-00002.safetensors, and "
        "model.safetensors.index.json says in model-00001-of-00002.safetensors",
    ),
    "an index that names too much": (
        lambda folder: (split_into_two(folder), take_from_second(folder)),
        "model.safetensors.index.json names model-00002-of-00002.safetensors for "
        "model.norm.weight, which is not in it",
    ),
    "an index that names a path": (
        lambda folder: (split_into_two(folder), exchange(folder, "../model.safetensors")),
        "model.safetensors.index.json: model.norm.weight is said to be in '../model.safetensors', "
        "no file beside it",
    ),
    "an index without a map": (
        lambda folder: (split_into_two(folder), (folder / INDEX).write_text("{}")),
        "model.safetensors.index.json cannot be read, or has no weight_map",
    ),
}


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def second(folder: Path) -> Path:
    return folder / "model-00002-of-00002.safetensors"


def tie_but_for(tensors: dict[str, Tensor], row: int) -> None:
    """Make the head the embedding, except for the last number of a row."""
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][row, -1] += 1


def add_to_first(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    save_file({**load_file(path), "model.norm.weight": torch.ones(32)}, path, {"format": "pt"})


def take_from_second(folder: Path) -> None:
    tensors = load_file(second(folder))
    del tensors["model.norm.weight"]
    save_file(tensors, second(folder), {"format": "pt"})


def exchange(folder: Path, file: str = "model-00001-of-00002.safetensors") -> None:
    """Have the index say that the last norm is in this file."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))


@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_with_a_folder_is_one_line(fault: str, tmp_path: Path):
    save_random("qwen3", tmp_path)
    loaded(tmp_path)
    break_it, expected = FAULTS[fault]
    break_it(tmp_path)
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path)
    assert str(refused.value) == f"{KEY}={tmp_path}: {expected}"
    assert "\n" not in str(refused.value)


OF_DEEPSEEK = {
    "rope_interleave": (None, "null"),
    "head_dim": (2, "2"),
    "qk_head_dim": (2, "2"),
    "is_causal": (False, "false"),
    "per_layer_config": ({"1": {"num_attention_heads": 2}}, '{"1": {"num_attention_heads": 2}}'),
    "transformers_weights": ("other.safetensors", '"other.safetensors"'),
}


@pytest.mark.parametrize("key", OF_DEEPSEEK)
def test_values_that_transformers_reads_differently_are_refused(key: str, tmp_path: Path):
    save_random("deepseek_v3", tmp_path)
    value, told = OF_DEEPSEEK[key]
    edit_config(tmp_path, **{key: value})
    with pytest.raises(ConfigError, match=f"config.json: {key}={told} is not supported"):
        loaded(tmp_path)


def test_a_type_that_only_transformers_4_reads_is_refused(tmp_path: Path):
    save_random("gemma3_text", tmp_path)
    edit_config(tmp_path, rope_scaling={"type": "linear", "factor": 8.0})
    with pytest.raises(ConfigError, match="in transformers 4 only: name it rope_type, or drop it"):
        loaded(tmp_path)
    edit_config(tmp_path, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert loaded(tmp_path).model.linear_rope_factor == 8


JUNK = ("x", "3", "", -1, 0, 1.5, 10**400, math.inf, math.nan, True, [], [1], {}, {"a": 1}, None)


def keys_of(section: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in section.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from keys_of(value, (*before, name))


@pytest.mark.every(20)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_wrong_value_in_config_json_gives_one_line(name: str, tmp_path: Path):
    save_random(name, tmp_path)
    path = tmp_path / "config.json"
    plain = path.read_text()
    lines = []
    for *outer, last in keys_of(json.loads(plain)):
        for junk in JUNK:
            config = json.loads(plain)
            section = config
            for key in outer:
                section = section[key]
            section[last] = junk
            path.write_text(json.dumps(config))
            try:
                TheirModel.read(tmp_path, KEY)
            except ConfigError as error:
                lines.append(str(error))
    own = f"{KEY}={tmp_path}: "
    assert len(lines) > 100 and all(line.startswith(own) for line in lines)
    assert not [line for line in lines if "\n" in line or len(line) > len(own) + 300]


def sections_of_old(config: dict[str, Any]) -> dict[str, Any]:
    """With the sections that `transformers` 4 writes."""
    config.pop("rope_parameters")
    sizes = {"original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    scaling = {"type": "yarn", "factor": 4.0, **sizes, "mscale": 1.0, "mscale_all_dim": 0.0}
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    return {**config, "rope_scaling": scaling, "quantization_config": blocks}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_whatever_a_section_has_is_one_line_of_its_key(name: str, tmp_path: Path):
    save_random(name, tmp_path)
    path = tmp_path / "config.json"
    config = sections_of_old(json.loads(path.read_text()))
    path.write_text(json.dumps(config))
    Pretrained(tmp_path, KEY)
    told = 0
    for section in ("rope_scaling", "quantization_config"):
        for key, junk in itertools.product(config[section], JUNK):
            changed = {**config, section: {**config[section], key: junk}}
            path.write_text(json.dumps(changed))
            try:
                Pretrained(tmp_path, KEY)
            except ConfigError as error:
                said = str(error)
                words = (f"{section}.", "YaRN", "rotary positions", "quantised", "model.")
                assert any(f"{tmp_path}: config.json: {as_}{word}" in said
                           for as_ in ("", "as ", "weights ") for word in words), said  # fmt: skip
                assert "\n" not in said and len(said) < 500
                told += 1
    assert told > 60


def bend(data: bytearray, random: Random) -> None:
    """Change a bit of a header, a digit of it, its length, or the file's."""
    end = 8 + int.from_bytes(data[:8], "little")
    match random.choice(("bit", "digit", "length", "end")):
        case "bit":
            data[random.randrange(8, end)] ^= 1 << random.randrange(8)
        case "digit":
            at = random.choice([at for at in range(8, end) if data[at : at + 1].isdigit()])
            data[at] ^= 1
        case "length":
            data[random.randrange(8)] ^= 1 << random.randrange(8)
        case "end":
            del data[random.randrange(len(data)) :]


def test_whatever_is_wrong_with_a_header_is_one_line(tmp_path: Path):
    """Or says nothing of the model."""
    save_random("llama", tmp_path)
    before = loaded(tmp_path).state_dict()
    path, random = tmp_path / "model.safetensors", Random(5)
    plain, lines = path.read_bytes(), []
    for _ in range(60):
        data = bytearray(plain)
        bend(data, random)
        path.write_bytes(data)
        try:
            after = loaded(tmp_path).state_dict()
            assert all(after[name].equal(value) for name, value in before.items())
        except ConfigError as error:
            lines.append(str(error))
    assert len(lines) > 50 and all("\n" not in line and len(line) < 500 for line in lines)
