"""Qwen2-MoE (Qwen1.5-MoE, Qwen2-57B-A14B): a shared expert with a gate, biases on queries, keys and
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.config import ModelConfig, MoEConfig
from app.hf import config_json, tables
from app.hf.tables import NameLine
from app.hf.their_config import TheirConfig

SHARED_EXPERT = (
    NameLine(
        "body.shared.w_up",
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        tables.gate_up,
    ),
    NameLine("body.shared.w_down", ("mlp.shared_expert.down_proj.weight",), tables.whole),
    NameLine("body.shared_gate", ("mlp.shared_expert_gate.weight",), tables.whole),
)
DEFAULTS = {
    "num_key_value_heads": 16,
    "router_aux_loss_coef": 0.001,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
}


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model."""
    moe = {
        "num_experts": config.either("num_experts", "num_local_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("moe_intermediate_size"),
        "shared_ffn_hidden_size": config.need("shared_expert_intermediate_size"),
        "shared_gate": True,
        **config_json.sparse_layers(config),
        "pre_softmax": not config.get("norm_topk_prob", False),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }
    return {
        **config_json.grouped(config, config_json.windows_of_odd_layers),
        "qkv_bias": config.get("qkv_bias", False),
        "ffn_hidden_size": config.need("intermediate_size"),
        "moe": moe,
    }


def written_moe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in config.json."""
    return {
        **config_json.written_qwen3_moe(moe),
        "shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
    }


def written(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of biases and of layers without experts."""
    return {**config_json.written_sparse_layers(model), "qkv_bias": model.qkv_bias}
