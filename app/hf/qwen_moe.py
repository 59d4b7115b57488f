"""Qwen2 and Qwen3 with experts; of the former also a shared expert with a gate, and biases on
queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.config import ModelConfig, MoEConfig
from app.hf import config_json
from app.hf.their_config import TheirConfig

DEFAULTS = {
    "num_key_value_heads": 16,
    "router_aux_loss_coef": 0.001,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
}


def sparse_layers(config: TheirConfig) -> dict[str, Any]:
    """Return which layers of a Qwen model have experts: every decoder_sparse_step-th that is not
    among mlp_only_layers.
    """
    step = config.get("decoder_sparse_step", 1)
    without = set(config.get("mlp_only_layers", ()))
    layers = range(config.need("num_hidden_layers"))
    dense = [layer for layer in layers if layer in without and (layer + 1) % max(step, 1) == 0]
    if step == 1 and dense == list(range(len(dense))):
        return {"every_n": 1, "first_k_dense": len(dense)}
    return {"every_n": step, "first_k_dense": step - 1, "dense_layers": tuple(dense)}


def written_sparse_layers(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that `sparse_layers` reads."""
    moe = model.moe
    assert moe is not None
    step = moe.every_n if moe.first_k_dense == moe.every_n - 1 else 1
    dense = [layer for layer in range(model.num_layers) if not model.is_moe_layer(layer)]
    return {
        "decoder_sparse_step": step,
        "mlp_only_layers": [layer for layer in dense if (layer + 1) % step == 0],
    }


def qwen3_moe(config: TheirConfig) -> dict[str, Any]:
    """Qwen3 with experts."""
    moe = {
        "num_experts": config.either("num_experts", "num_local_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("moe_intermediate_size"),
        **sparse_layers(config),
        "pre_softmax": not config.get("norm_topk_prob", False),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }
    ffn = config.need("intermediate_size")
    fields = config_json.grouped(config, config_json.windows_if_used)
    fields |= config_json.attention_biases(config)
    return {**fields, "qk_norm": True, "ffn_hidden_size": ffn, "moe": moe}


def written_qwen3_moe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in the config.json of Qwen3-MoE."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "norm_topk_prob": not moe.pre_softmax,
        "router_aux_loss_coef": moe.aux_loss_coeff,
    }


def shared_experts(config: TheirConfig) -> dict[str, Any]:
    """Return the fields of experts beside a shared one with a gate, in every layer."""
    return {
        "num_experts": config.either("num_experts", "num_local_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("moe_intermediate_size"),
        "shared_ffn_hidden_size": config.need("shared_expert_intermediate_size"),
        "shared_gate": True,
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }


def qwen2_moe(config: TheirConfig) -> dict[str, Any]:
    """Qwen2 with experts."""
    moe = {**shared_experts(config), **sparse_layers(config)}
    moe["pre_softmax"] = not config.get("norm_topk_prob", False)
    return {
        **config_json.grouped(config, config_json.windows_of_odd_layers),
        "qkv_bias": config.get("qkv_bias", False),
        "ffn_hidden_size": config.need("intermediate_size"),
        "moe": moe,
    }


def written_qwen2_moe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in config.json."""
    return {
        **written_qwen3_moe(moe),
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
    }


def written_qwen2(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of biases and of layers without experts."""
    return {**written_sparse_layers(model), "qkv_bias": model.qkv_bias}
