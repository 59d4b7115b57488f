"""What is wrong with quantised weights, or their description, is one line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.errors import ConfigError
from app.hf.pretrained import Pretrained
from app.hf.their_model import TheirModel
from tests.hf_folders import KEY, edit_config, edit_tensors, loaded, save_random
from tests.quantised_folders import of_groups, per_block, per_row, save_fp8, save_mxfp4
from tests.tensors.test_hf_faults import JUNK

GATE = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.down_proj.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
FILE = "model.safetensors"
ORIGINAL = "name the model that it was quantised from, or save it with its weights in 16 bits"


def change(name: str, edit: Callable[[Tensor], Tensor]) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, lambda t: t.update({name: edit(t[name])}))


def drop(*names: str) -> Callable[[Path], object]:
    return lambda folder: edit_tensors(folder, lambda t: [t.pop(name) for name in names])


def how(values: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, quantization_config=values)


def plain_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("_blocks")]:
        weight = name.removesuffix("_blocks")
        experts, outputs, groups, _ = tensors.pop(name).shape
        del tensors[f"{weight}_scales"]
        tensors[weight] = torch.ones(experts, groups * 32, outputs)


FAULTS_OF_MXFP4: dict[str, tuple[Callable[[Path], object], str]] = {
    "no scales": (drop(f"{GATE}_scales"), f"{FILE}: {GATE}_blocks is without gate_up_proj_scales"),
    "no blocks": (drop(f"{GATE}_blocks"), f"{GATE} is missing from the files"),
    "scales of other rows": (
        change(f"{GATE}_scales", lambda scales: scales[:, 2:].clone()),
        f"{FILE}: {GATE}_scales has the shape [8, 190, 2] instead of [8, 192, 2]",
    ),
    "blocks of other sizes": (
        change(f"{GATE}_blocks", lambda blocks: blocks[..., 8:].clone()),
        f"{FILE}: {GATE}_blocks has the shape [8, 192, 2, 8] instead of [8, 192, 2, 16]",
    ),
    "floats as scales": (
        change(f"{GATE}_scales", lambda scales: scales.float()),
        f"{FILE}: {GATE}_scales is of type F32, not U8",
    ),
    "no config": (
        how(...),
        f"{FILE}: {GATE}_blocks is of MXFP4 without quantization_config of mxfp4 in config.json",
    ),
    "no experts in MXFP4": (
        lambda folder: edit_tensors(folder, plain_experts),
        "has quantization_config in config.json, and no weight is quantised; take "
        "quantization_config out of it if that is right",
    ),
}
FAULTS_OF_FP8: dict[str, tuple[Callable[[Path], object], str]] = {
    "no scale": (
        drop(f"{DOWN}_scale"),
        f"{FILE}: {DOWN} is of type F8_E4M3 without weight_scale_inv",
    ),
    "scales of other rows": (
        change(f"{DOWN}_scale", lambda scales: scales[1:].clone()),
        f"{FILE}: {DOWN}_scale has the shape [31, 1] instead of [32, 1]",
    ),
    "bytes as scales": (
        change(f"{DOWN}_scale", lambda scales: scales.byte()),
        f"{FILE}: {DOWN}_scale is of type U8, not F32, BF16, F16",
    ),
    "scales of another kind": (
        how(of_groups("tensor")),
        f"{FILE}: {QUERY}_scale has the shape [32, 1] instead of []",
    ),
    "no config": (
        how(...),
        f"{FILE}: {QUERY} is of type F8_E4M3 without a block size in config.json",
    ),
    "a scale of a plain weight": (
        change(DOWN, lambda weight: weight.bfloat16()),
        f"{FILE}: {DOWN} is of type BF16, and has a weight_scale as weights of F8_E4M3",
    ),
    "a zero point": (
        lambda folder: edit_tensors(
            folder, lambda t: t.update({f"{DOWN}_zero_point": torch.ones(1)})
        ),
        f"{DOWN}_zero_point is unknown in models of type llama",
    ),
}


def expect(folder: Path, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(folder)
    assert str(refused.value) == f"{KEY}={folder}: {expected}"


@pytest.mark.every(3)
@pytest.mark.parametrize("fault", FAULTS_OF_MXFP4)
def test_faults_of_mxfp4_files_are_one_line(fault: str, tmp_path: Path):
    save_mxfp4(tmp_path)
    break_it, expected = FAULTS_OF_MXFP4[fault]
    break_it(tmp_path)
    expect(tmp_path, expected)


def test_mxfp4_holds_whole_blocks_only(tmp_path: Path):
    save_mxfp4(tmp_path)
    files = Pretrained(tmp_path, KEY).files
    files.check(GATE, (8, 64, 192))
    for shape in (8, 80, 192), (64, 192):
        with pytest.raises(ConfigError, match=rf"cannot hold a weight of the shape \[{shape[0]}, "):
            files.check(GATE, shape)


@pytest.mark.parametrize("fault", FAULTS_OF_FP8)
def test_faults_of_fp8_files_are_one_line(fault: str, tmp_path: Path):
    save_fp8("llama", tmp_path / "fp8", of_groups("channel"), per_row, "_scale")
    break_it, expected = FAULTS_OF_FP8[fault]
    break_it(tmp_path / "fp8")
    expect(tmp_path / "fp8", expected)


def test_config_of_fp8_without_fp8_weights_is_one_line(tmp_path: Path):
    save_random("llama", tmp_path)
    how({"quant_method": "fp8", "weight_block_size": [16, 16]})(tmp_path)
    expect(tmp_path, FAULTS_OF_MXFP4["no experts in MXFP4"][1])


def test_blocks_are_transformers_own_without_a_size(tmp_path: Path):
    """Scales of one block of 128 × 128 each; others are refused."""
    folder = tmp_path / "fp8"
    save_fp8("llama", folder, {"quant_method": "fp8"}, per_block, "_scale_inv")
    expect(folder, f"{FILE}: {QUERY}_scale_inv has the shape [2, 2] instead of []")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "modelopt", "fbgemm_fp8"])
def test_other_quantisations_are_refused(method: str, tmp_path: Path):
    save_random("llama", tmp_path)
    how({"quant_method": method, "bits": 4})(tmp_path)
    read = "only fp8, compressed-tensors in FP8 and mxfp4"
    what = f"config.json: weights quantised by {method} are not supported, {read}"
    expect(tmp_path, f"{what}; {ORIGINAL}")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "four bits": (
        {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}},
        "config_groups.a.weights.num_bits=4",
    ),
    "whole numbers": (
        {"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}},
        'config_groups.a.weights.type="int"',
    ),
    "packed": ({"format": "pack-quantized"}, 'format="pack-quantized"'),
    "mixed": ({"format": "mixed-precision"}, 'format="mixed-precision"'),
    "groups of columns": (of_groups("group"), 'config_groups.group_0.weights.strategy="group"'),
    "sparse": (
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        'sparsity_config.format="sparse-24-bitmask"',
    ),
    "rotated": ({"transform_config": {"config_groups": {}}}, 'transform_config={"config_groups'),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_compressed_tensors_are_refused(case: str, tmp_path: Path):
    save_random("llama", tmp_path)
    changes, told = OTHERS[case]
    how(of_groups("channel") | changes)(tmp_path)
    with pytest.raises(ConfigError) as refused:
        TheirModel.read(tmp_path, KEY)
    said = str(refused.value)
    assert said.startswith(f"{KEY}={tmp_path}: config.json: quantization_config.{told}")
    assert said.endswith(" is not supported")


def test_junk_in_compressed_tensors_is_one_line(tmp_path: Path):
    save_random("llama", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    told = 0
    for junk, place in itertools.product(JUNK, range(4)):
        section = of_groups("block")
        at: Any = section
        for name in ("config_groups", "group_0", "weights")[:place]:
            at = at[name]
        for key in at:
            kept, at[key] = at[key], junk
            path.write_text(json.dumps({**values, "quantization_config": section}))
            at[key] = kept
            try:
                TheirModel.read(tmp_path, KEY)
            except ConfigError as error:
                assert str(error).startswith(f"{KEY}={tmp_path}: config.json: ")
                assert "\n" not in str(error) and len(str(error)) < 500
                told += 1
    assert told > 100


def test_truncated_mxfp4_files_are_one_line(tmp_path: Path):
    save_mxfp4(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=f"{FILE} is truncated or no safetensors file"):
        Pretrained(tmp_path, KEY)
