"""Hugging Face folders with quantised weights, and models of the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.hf_folders import edit_config, edit_tensors, save_random, transformers
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import spread_weights

Scheme = tuple[Tensor, Tensor]  # FP8 values and scales
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
WIDTH = 96  # of an expert's feed-forward: three blocks, which two ranks split within one


def per_tensor(weight: Tensor, shape: tuple[int, ...] = ()) -> Scheme:
    scale = (weight.abs().max() / 448).view(shape)
    return (weight / scale).to(torch.float8_e4m3fn), scale


def per_row(weight: Tensor) -> Scheme:
    scales = weight.abs().amax(dim=1, keepdim=True).bfloat16() / 448
    return (weight / scales.float()).to(torch.float8_e4m3fn), scales


def per_block(weight: Tensor) -> Scheme:
    """Blocks of 16 rows and 24 columns."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 16), -(-columns // 24)) / 64 + 0.01
    return (weight / spread(scales, weight)).to(torch.float8_e4m3fn), scales


def spread(scales: Tensor, weight: Tensor) -> Tensor:
    """The scale of each element of a weight."""
    if scales.shape not in ((), (1,), (weight.shape[0], 1)):
        rows, columns = weight.shape
        scales = scales.repeat_interleave(16, 0).repeat_interleave(24, 1)[:rows, :columns]
    return scales.float().expand(weight.shape)


def of_groups(*strategies: str, form: str = "float-quantized", **more: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors, as llm-compressor writes it."""
    block = {"block_structure": [16, 24]}
    groups = {
        f"group_{number}": {
            "targets": ["Linear"],
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
            "weights": {
                "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
                "strategy": name, "group_size": None, **(block if name == "block" else {}),
            },
        }
        for number, name in enumerate(strategies)
    }  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups,
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
            "sparsity_config": {}, "transform_config": {}, "version": "0.13.0", **more}  # fmt: skip


def save_fp8(
    family: str, folder: Path, how: dict[str, Any], scheme: Callable[[Tensor], Scheme], scale: str
) -> nn.Module:
    """Save a model with projections in FP8; returns it with the weights that these stand for."""
    model, _ = save_random(family, folder)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "proj" in name or "experts" in name]:
            values, scales = scheme(tensors[name])
            plain[name] = values.float() * spread(scales, values)
            tensors |= {name: values, f"{name}{scale}": scales}

    plain: dict[str, Tensor] = {}
    edit_tensors(folder, quantise)
    edit_config(folder, quantization_config=...)
    whole = folder.parent / f"{folder.name}-plain"
    model.save_pretrained(whole, save_original_format=True)
    edit_tensors(whole, lambda tensors: tensors.update(plain))
    edit_config(folder, quantization_config=how)
    return transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()


def gpt_oss() -> Any:
    """A random model of a size that MXFP4 can hold."""
    build, theirs, _ = CASES["gpt-oss"]()
    theirs.hidden_size, theirs.intermediate_size = 64, WIDTH
    model = build(theirs).eval()
    spread_weights(model)
    return model


def save_mxfp4(folder: Path) -> Any:
    """Save GPT-OSS with random experts in MXFP4; returns it with the weights that these stand for,
    as `transformers` dequantises them.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = gpt_oss()
    packed: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = experts, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            scales = torch.randint(120, 126, shape, dtype=torch.uint8)
            weight.data = convert_moe_packed_tensors(blocks, scales).float()
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    model.save_pretrained(folder)

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in packed:
            tensors.pop(name.rpartition("_")[0], None)
        tensors |= packed

    edit_tensors(folder, pack)
    edit_config(folder, quantization_config=MXFP4)
    return model
