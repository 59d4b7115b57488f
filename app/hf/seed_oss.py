"""Seed-OSS: Qwen2's layers with heads of a width of their own; exported as Qwen2."""

from __future__ import annotations

from typing import Any

from app.hf import config_json
from app.hf.their_config import TheirConfig

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
}


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model. Biases on outputs of attention are refused."""
    config.only("attention_out_bias", False)
    return {**config_json.dense(config), "qkv_bias": config.get("attention_bias", False)}
