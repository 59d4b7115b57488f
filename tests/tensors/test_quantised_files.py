"""Quantised weights of Hugging Face folders are read as `transformers` dequantises them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from app.cli import convert
from app.hf import mxfp4, pretrained
from app.hf.file_names import CONFIG_JSON
from app.hf.files import Region
from app.hf.pretrained import Pretrained
from app.plan.sharding.blocks import ShardCoords
from tests.hf_folders import KEY, edit_tensors, loaded, their_logits, transformers
from tests.processes.hf_export import tensors_of
from tests.quantised_folders import (
    of_groups,
    per_block,
    per_row,
    per_tensor,
    save_fp8,
    save_mxfp4,
)
from tests.tensors.models import draw_tokens, forward

PLAIN = {"quant_method": "fp8", "activation_scheme": "static"}
NO_BLOCKS = {**PLAIN, "weight_block_size": None}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 24]}
one = partial(per_tensor, shape=(1,))
# family, quantization_config, scheme, suffix of the scales
FP8: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], tuple[Tensor, Tensor]], str]] = {
    "a number": ("llama", PLAIN, per_tensor, "_scale"),
    "an inverse": ("mixtral", NO_BLOCKS, per_tensor, "_scale_inv"),
    "blocks": ("deepseek_v3", BLOCKS, per_block, "_scale_inv"),
    "naive": ("llama", of_groups("tensor", form="naive-quantized"), one, "_scale"),
    "rows": ("qwen3_moe", of_groups("channel"), per_row, "_scale"),
    "groups": ("qwen3", of_groups("channel", "block"), per_block, "_scale"),
}


def expect_same(folder: Path, theirs: nn.Module) -> None:
    """The logits of a folder are those of a model of `transformers`."""
    chunk = loaded(folder)
    tokens = draw_tokens(chunk.model, 2, 17)
    expected = their_logits(theirs, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(forward(chunk, tokens).x, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize("case", FP8)
@torch.no_grad()
def test_fp8_files_give_dequantised_logits(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pretrained, "PART_NUMEL", 700)  # parts of 21 rows begin within blocks
    family, how, scheme, scale = FP8[case]
    folder = tmp_path / "fp8"
    expect_same(folder, save_fp8(family, folder, how, scheme, scale))
    if how is NO_BLOCKS:  # and as `transformers` reads the same files
        kind = transformers.AutoModelForCausalLM
        expect_same(folder, kind.from_pretrained(folder, dtype=torch.float32).eval())


@torch.no_grad()
def test_mxfp4_files_give_dequantised_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pretrained, "PART_NUMEL", 7000)
    theirs = save_mxfp4(tmp_path)
    expect_same(tmp_path, theirs)
    # and as `transformers` reads the same files
    expect_same(tmp_path, transformers.GptOssForCausalLM.from_pretrained(tmp_path).float().eval())


def test_mxfp4_values_by_hand():
    """Two values in a byte, the low bits first; outputs in rows."""
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0x72  # 1 and 6
    blocks[0, 1, 0, 15] = 0x9F  # -6 and -0.5
    scales = torch.tensor([[[128], [0]]], dtype=torch.uint8)  # 2 and 2^-127
    found = mxfp4.dequantised(blocks, scales, (0, 32))
    assert found.shape == (1, 32, 2) and found.dtype == torch.bfloat16
    assert found[0, :2, 0].tolist() == [2.0, 12.0]
    assert found[0, 30:, 1].tolist() == [-6 * 2.0**-127, -0.5 * 2.0**-127]
    assert found.count_nonzero() == 4


def test_every_byte_and_scale_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 254, 1, 1)
    scales = torch.arange(254, dtype=torch.uint8).view(1, 254, 1).repeat(1, 1, 16)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(mxfp4.dequantised(blocks, scales, (0, 512)), expected)


@pytest.mark.parametrize(("ep", "etp"), [(4, 1), (1, 2), (2, 2)])
def test_a_rank_reads_its_part_of_mxfp4(
    ep: int, etp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_mxfp4(tmp_path)
    whole, found = loaded(tmp_path), Pretrained(tmp_path, KEY)
    plain, read = found.files._part, 0

    def counting(name: str, region: Region) -> Tensor:
        nonlocal read
        part = plain(name, region)
        read += part.numel() if part.dtype == torch.uint8 else 0
        return part

    monkeypatch.setattr(found.files, "_part", counting)
    coords = ShardCoords((0, 1), (ep - 1, ep), (etp - 1, etp))
    for named, values in whole.weights():
        part = torch.full(coords.shape(named.weight), torch.nan)
        found.fill([(named, part)], coords)
        block = coords.block(named.weight)
        box = tuple(map(slice, block.start, block.stop))
        expected = values.detach().view(named.weight.shape)[box].reshape(part.shape)
        assert torch.equal(part, expected), named.name
        # a byte per two values, a scale per 32; of ranks that split a block, both read it
        at_most = part.numel() * 17 / 32 * (4 / 3 if etp > 1 and "w_down" in named.name else 1)
        assert read == 0 if "experts.w" not in named.name else 0 < read <= at_most
        read = 0


@pytest.mark.parametrize("case", ["mxfp4", "rows"])
def test_an_export_has_quantised_weights_in_bf16(case: str, tmp_path: Path):
    theirs = tmp_path / "theirs"
    if case == "mxfp4":
        model = save_mxfp4(theirs)
    else:
        model = save_fp8(FP8[case][0], theirs, *FP8[case][1:])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "plain", save_original_format=True)
    for line in (["from-hf", "theirs", "run"], ["to-hf", "run", "out"]):
        assert convert.main([line[0], *(str(tmp_path / each) for each in line[1:])]) == 0
    before, after = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name].bfloat16())]
    quantised = [name for name in after if "experts." in name and "bias" not in name]
    assert changed == [] and {after[name].dtype for name in quantised} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "out" / CONFIG_JSON).read_text())


def test_scales_of_activations_are_left_out(tmp_path: Path):
    save_fp8("llama", tmp_path / "fp8", {**PLAIN, "kv_cache_scheme": "static"}, one, "_scale")
    layer = "model.layers.0"
    more = (f"{layer}.mlp.down_proj.input_scale", f"{layer}.self_attn.k_scale")
    edit_tensors(tmp_path / "fp8", lambda t: t.update({name: torch.ones(1) for name in more}))
    assert Pretrained(tmp_path / "fp8", KEY).left_out() == (
        f"left out: {', '.join(more)}, as activations are not quantised; config.json: "
        "quantization_config.kv_cache_scheme, as keys and values are not quantised"
    )
