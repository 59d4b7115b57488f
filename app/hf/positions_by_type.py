"""Rotary positions that differ between layers with a sliding window and others.

`transformers` 5 has a section for each type of layer in `rope_parameters`; version 4 has
`rope_theta` and `rope_scaling` for layers without a window, and other keys for layers with one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config import ModelConfig
from app.hf.config_json import FULL, SLIDING, Windows, dense
from app.hf.rotary import UNSCALED, rotary_of, written_scaling
from app.hf.their_config import TheirConfig

SECTION = "rope_parameters"


def dense_by_type(
    config: TheirConfig, windows: Windows, *, theta: float, local_theta: float
) -> dict[str, Any]:
    """Return the fields of a dense model with positions by type of layer.

    theta, local_theta: bases if their sections lack them.
    """
    both = config.section(SECTION)
    full, sliding = (_section(both, kind) for kind in (FULL, SLIDING))
    if extra := sorted(both.values.keys() - {FULL, SLIDING}):
        raise both.refusal(f"{both.name(extra[0])} is outside of the sections of types of layers")
    scaling = config.get("rope_scaling", {})
    if "type" in scaling and "rope_type" not in scaling:
        what = "rope_scaling.type counts in transformers 4 only: name it rope_type, or drop it"
        raise config.refusal(what)
    whole = {**full.values, **scaling}
    whole["rope_theta"] = theta if whole.get("rope_theta") is None else whole["rope_theta"]
    local = dict(sliding.values)
    local["rope_theta"] = local_theta if local.get("rope_theta") is None else local["rope_theta"]

    def positions(config: TheirConfig) -> dict[str, Any]:
        return rotary_of(config, replace(full, values=whole))

    found = dense(config, windows, positions)
    unlike = rotary_of(config, replace(sliding, values=local))
    if any(unlike[name] != value for name, value in UNSCALED.items()):
        raise sliding.unsupported("rope_type")
    if found["sliding_window"] is None:
        return found
    if not found["layer_types"]:
        return found | unlike
    same = all(found[name] == value for name, value in unlike.items())
    return {**found, "local_rope_theta": None if same else unlike["rope_theta"]}


def _section(both: TheirConfig, kind: str) -> TheirConfig:
    """Return the section of a type of layer; an empty one if it is missing or null."""
    found = both.get(kind, {})
    if not isinstance(found, dict):
        raise both.refusal(f"{both.said(kind)} is no section")
    asked = both.asked_within.setdefault(kind, set())
    return TheirConfig(found, both.path, both.key, inside=f"{both.inside}.{kind}", asked=asked)


def written_by_type(model: ModelConfig) -> Mapping[str, Any]:
    """Return the sections of both types of layers."""
    scaling = written_scaling(model) or {"rope_type": "default"}
    local = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
    return {
        SECTION: {
            FULL: {"rope_theta": model.rope_theta, **scaling},
            SLIDING: {"rope_theta": local, "rope_type": "default"},
        }
    }
