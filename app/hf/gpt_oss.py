"""GPT-OSS: attention sinks, biases everywhere, and experts with a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config import MoEConfig
from app.hf.config_json import attention_biases, grouped, windows_by_interval
from app.hf.their_config import TheirConfig

ALPHA = 1.702  # of the activation
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_alpha": ALPHA,
    "swiglu_limit": 7.0,
    "router_aux_loss_coef": 0.001,
}
# of a config.json without rotary positions
POSITIONS: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(config: TheirConfig) -> dict[str, Any]:
    """Return the fields of GPT-OSS."""
    if all(config.value(name) is None for name in ("rope_scaling", "rope_parameters")):
        config = replace(config, values={**config.values, "rope_scaling": POSITIONS})
    alpha = config.need("swiglu_alpha")
    moe = {
        "num_experts": config.either("num_local_experts", "num_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("intermediate_size"),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        "expert_bias": True,
        "logit_bias": True,
        "swiglu_limit": config.need("swiglu_limit"),
        "swiglu_alpha": None if alpha == ALPHA else alpha,
    }
    return {
        **grouped(config, windows_by_interval(2)),
        **attention_biases(config),
        "sinks": True,
        "moe": moe,
    }


def written_moe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in its config.json."""
    return {
        "intermediate_size": moe.ffn_hidden_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "swiglu_limit": moe.swiglu_limit,
        "swiglu_alpha": moe.activation_alpha,
    }
