"""GLM-4.5, GLM-4.5-Air and GLM-4.6 (`glm4_moe`): grouped-query attention that rotates half of each
head, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.config import ModelConfig
from app.hf import config_json, deepseek
from app.hf.rotary import rotary_of_part, written_factor
from app.hf.their_config import TheirConfig

DEFAULTS = {
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
}


def read(config: TheirConfig) -> dict[str, Any]:
    """Return the fields of a model; its attention has no bias on the output."""
    return {
        **config_json.grouped(config, positions=rotary_of_part),
        "qkv_bias": config.get("attention_bias", False),
        "qk_norm": config.get("use_qk_norm", False),
        "ffn_hidden_size": config.need("intermediate_size"),
        "moe": {**deepseek.sigmoid_router(config), **deepseek.deepseek_experts(config)},
    }


def written(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of its config.json that DeepSeek-V3 lacks."""
    return {
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_norm,
        "partial_rotary_factor": written_factor(model),
    }
