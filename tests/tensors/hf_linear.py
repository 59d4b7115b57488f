"""Small models of Qwen3-Next and Qwen3.5, and their attention by our names, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from app.choices import LayerType, NormKind
from app.config import LinearAttentionConfig, ModelConfig, MoEConfig

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "vocab_size": 96}
THEIR_SIZES = {
    **SIZES,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rms_norm_eps": 1e-4,  # outputs of heads are small before their norm
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
THEIR_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
LINEAR = LinearAttentionConfig(key_heads=2, value_heads=4, key_head_dim=8, value_head_dim=12)
EXPERTS = MoEConfig(
    num_experts=8, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=40, shared_gate=True
)
FULL_LAST = (*[LayerType.linear_attention] * 3, LayerType.full_attention)


def _ours(**fields: Any) -> ModelConfig:
    usual: dict[str, Any] = {
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rotary_dim": 4,
        "norm_eps": 1e-4,
        "norm": NormKind.rms_plus_one,
        "qk_norm": True,
        "attention_gate": True,
        "layer_types": FULL_LAST,
        "linear_attention": LINEAR,
    }
    return ModelConfig(**SIZES, **usual | fields)


def qwen3_next() -> Any:
    """(Hugging Face class, its configuration, ours); the second layer has no experts."""
    theirs = transformers.Qwen3NextConfig(
        **THEIR_SIZES,
        **THEIR_EXPERTS,
        intermediate_size=56,
        mlp_only_layers=[1],
    )
    moe = dataclasses.replace(EXPERTS, dense_layers=(1,))
    return transformers.Qwen3NextForCausalLM, theirs, _ours(moe=moe, ffn_hidden_size=56)


def qwen3_5(tied: bool = False) -> Any:
    """Like `qwen3_next`, dense; the first and the last layer have other types."""
    types = ["full_attention", *["linear_attention"] * 3]
    theirs = transformers.Qwen3_5TextConfig(
        **THEIR_SIZES,
        intermediate_size=56,
        layer_types=types,
        tie_word_embeddings=tied,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e3,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    ours = _ours(
        moe=None,
        ffn_hidden_size=56,
        layer_types=tuple(map(LayerType, types)),
        rope_theta=1e3,
        rotary_dim=8,
        tie_embeddings=tied,
    )
    return transformers.Qwen3_5ForCausalLM, theirs, ours


def qwen3_5_moe() -> Any:
    """Like `qwen3_next`, with experts in every layer."""
    theirs = transformers.Qwen3_5MoeTextConfig(**THEIR_SIZES, **THEIR_EXPERTS)
    return transformers.Qwen3_5MoeForCausalLM, theirs, _ours(moe=EXPERTS)


def linear_attention(
    hf: dict[str, Tensor], ours: str, theirs: str, linear: LinearAttentionConfig
) -> dict[str, Tensor]:
    """The weights of one layer's gated delta net."""
    groups, key = linear.key_heads, linear.key_head_dim
    values = linear.values_per_key * linear.value_head_dim
    sizes = [groups * key, groups * key, groups * values]

    def by_head(*parts: Tensor) -> Tensor:
        return torch.cat([each.unflatten(0, (groups, -1)) for each in parts], 1).flatten(0, 1)

    def read(name: str) -> Tensor:
        return hf[f"{theirs}.{name}"]

    if f"{theirs}.in_proj_qkvz.weight" in hf:
        w_in, w_beta = read("in_proj_qkvz.weight"), read("in_proj_ba.weight")
    else:
        w_in = by_head(*read("in_proj_qkv.weight").split(sizes), read("in_proj_z.weight"))
        w_beta = by_head(read("in_proj_b.weight"), read("in_proj_a.weight"))
    return {
        f"{ours}.a_log": read("A_log"),
        f"{ours}.dt_bias": read("dt_bias"),
        f"{ours}.conv": by_head(*read("conv1d.weight")[:, 0].split(sizes)),
        f"{ours}.w_in": w_in,
        f"{ours}.w_beta": w_beta,
        f"{ours}.norm.weight": read("norm.weight"),
        f"{ours}.w_out": read("out_proj.weight"),
    }
