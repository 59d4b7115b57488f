"""Seed-OSS: Qwen2's layers with heads of a width of their own and more biases."""

from __future__ import annotations

from typing import Any

from app.config import ModelConfig
from app.hf import config_json
from app.hf.their_config import TheirConfig

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
}


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model."""
    return {
        **config_json.dense(config),
        **config_json.mlp_bias(config),
        "qkv_bias": config.get("attention_bias", False),
        "attn_out_bias": config.get("attention_out_bias", False),
    }


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of its config.json that other families lack."""
    return {"attention_bias": model.qkv_bias, "attention_out_bias": model.attn_out_bias}
