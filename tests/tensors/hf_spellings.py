"""Shared by test_hf_spellings.py and other tests."""

from __future__ import annotations

from typing import Any


def config_of_4(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions as two keys, and the older name of the type."""
    rotary = dict(config.pop("rope_parameters"))
    named = "type"
    if "sliding_attention" in rotary:
        named = "rope_type"
        config["rope_local_base_freq"] = rotary["sliding_attention"]["rope_theta"]
        rotary = dict(rotary["full_attention"])
    kind = rotary.pop("rope_type")
    theta = rotary.pop("rope_theta")
    neox = config["model_type"] == "gpt_neox"
    if "partial_rotary_factor" in rotary:
        part = "rotary_pct" if neox else "partial_rotary_factor"
        config[part] = rotary.pop("partial_rotary_factor")
    config.pop("dtype", None)
    scaling = None if kind == "default" else {named: kind, **rotary}
    base = "rotary_emb_base" if neox else "rope_theta"
    return {**config, base: theta, "rope_scaling": scaling, "torch_dtype": "float32"}
