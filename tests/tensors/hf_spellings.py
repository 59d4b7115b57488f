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
    if "partial_rotary_factor" in rotary:
        config["partial_rotary_factor"] = rotary.pop("partial_rotary_factor")
    config.pop("dtype", None)
    scaling = None if kind == "default" else {named: kind, **rotary}
    return {**config, "rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "float32"}
