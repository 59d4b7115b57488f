"""Rotary positions of config.json, scaled or not, to fields of a `ModelConfig`, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config import ModelConfig
from app.config.model import SCALINGS
from app.hf.config_keys import check_rotary
from app.hf.their_config import TheirConfig, shortened

YARN = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
LONGROPE = {
    "original_length": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
LLAMA3 = {
    "factor": "factor",
    "original_length": "original_max_position_embeddings",
    "low_turns": "low_freq_factor",
    "high_turns": "high_freq_factor",
}
UNSCALED: Mapping[str, Any] = {**dict.fromkeys(SCALINGS), "linear_rope_factor": 1.0}
PART = "partial_rotary_factor"
THETA = 10000.0  # default base of rotary frequencies


def rotary(config: TheirConfig, *, latent: bool) -> dict[str, Any]:
    """Return base and scaling of rotary frequencies; `latent`: of multi-head latent attention."""
    return rotary_of(config, _rotary_section(config), latent=latent)


def rotary_of_part(config: TheirConfig, usual: float | None = None) -> dict[str, Any]:
    """Return rotary positions of the first values of each head: partial_rotary_factor of them, of
    the section before that outside; `usual`: where both are missing.
    """
    said = _rotary_section(config)
    factor, outside = said.value(PART), config.value(PART)
    if factor is None:
        # null outside is 1 to `transformers`, and its own default when it has saved that
        factor = usual if outside is None and PART not in config.values else config.need(PART)
    if factor is None:
        raise config.refusal(f"{PART} is missing")
    whole = head_width(config)
    width = int(whole * factor)
    found = rotary_of(config, said, partial=True)
    return {**found, "rotary_dim": None if width == whole else width}


def head_width(config: TheirConfig) -> int:
    """Return the width of a head, by head_dim or the number of heads."""
    usual = config.need("hidden_size") // max(1, config.need("num_attention_heads"))
    return int(config.get("head_dim", usual))


def written_factor(model: ModelConfig) -> float:
    """Return the partial_rotary_factor of rotary_dim; readers multiply it by the width of a head
    and cut off the fraction, which rounding must not bring one below.
    """
    width, rotated = model.head_width, model.rope.width
    factor = rotated / width
    return factor if int(width * factor) == rotated else math.nextafter(factor, 2)


def rotary_of(
    config: TheirConfig, said: TheirConfig, *, latent: bool = False, partial: bool = False
) -> dict[str, Any]:
    """Return base and scaling of the rotary frequencies that a section describes; `partial`: of a
    family that rotates a part of each head.
    """
    if sections := [name for name, value in said.values.items() if isinstance(value, dict)]:
        raise said.refusal(f"{said.name(sections[0])} is a section: other positions in some layers")
    if not partial:
        said.only(PART, 1)
    theta = float(said.get("rope_theta", config.get("rope_theta", THETA)))
    kind = said.get("rope_type", said.get("type", "default"))
    lengths = [
        config.value("original_max_position_embeddings"),  # counts there before the section's
        said.value("original_max_position_embeddings"),
        config.value("max_position_embeddings"),
    ]
    original = next((length for length in lengths if length is not None), None)
    scaling = replace(said, values={**said.values, "original_max_position_embeddings": original})
    found: dict[str, Any] = {"rope_theta": theta, **UNSCALED}
    match kind:
        case "default":
            pass
        case "llama3":
            found["llama3_rope"] = scaling.renamed(LLAMA3)
        case "yarn":
            found["yarn"] = _yarn(scaling, latent=latent)
        case "longrope":
            found["longrope"] = _longrope(config, scaling)
        case "dynamic":
            length = config.need("max_position_embeddings")
            found["dynamic_rope"] = {"factor": scaling.need("factor"), "original_length": length}
        case "linear":
            found["linear_rope_factor"] = float(scaling.need("factor"))
        case _:
            told = shortened(str(kind))
            raise config.refusal(f"rotary positions of type {told} are not supported")
    check_rotary(said, kind)
    return found


def _rotary_section(config: TheirConfig) -> TheirConfig:
    """Return the section of rotary positions; if there are two, the one `transformers` uses."""
    both = [name for name in ("rope_scaling", "rope_parameters") if config.value(name)]
    if len(both) == 2:
        config.asked.remove(both[1])  # is left out
    return config.section(both[0] if both else "rope_scaling")


def _longrope(config: TheirConfig, scaling: TheirConfig) -> dict[str, Any]:
    found = scaling.renamed(LONGROPE)
    factor = scaling.value("factor")
    if factor is None:
        factor = config.need("max_position_embeddings") / max(1, found["original_length"])
    return {**found, "factor": factor, "attention_factor": scaling.value("attention_factor")}


def _yarn(scaling: TheirConfig, *, latent: bool) -> dict[str, Any]:
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    found = {
        ours: scaling.get(theirs, usual[ours]) if ours in usual else scaling.need(theirs)
        for ours, theirs in YARN.items()
    }
    found["attention_factor"] = scaling.value("attention_factor")
    found["truncate"] = scaling.get("truncate", True)
    if "truncate" in scaling.values:
        scaling.only("truncate", True, False)
    both = scaling.get("mscale", None) and scaling.get("mscale_all_dim", None)
    if not both and (found["mscale"], found["mscale_all_dim"]) != (1.0, 0.0):
        raise scaling.refusal(
            "YaRN with one of mscale and mscale_all_dim, of which both count or none"
        )
    if found["mscale_all_dim"] and not latent:
        raise scaling.refusal(
            "YaRN with mscale_all_dim, which this family leaves out of its softmax"
        )
    return found


def written_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Return the section of scaled rotary frequencies; None if they are unscaled."""
    if model.llama3_rope is not None:
        values = {theirs: getattr(model.llama3_rope, ours) for ours, theirs in LLAMA3.items()}
        return {"rope_type": "llama3", **values}
    if model.longrope is not None:
        values = {theirs: getattr(model.longrope, ours) for ours, theirs in LONGROPE.items()}
        lists = {name: list(each) for name, each in values.items() if isinstance(each, tuple)}
        kept = {name: getattr(model.longrope, name) for name in ("factor", "attention_factor")}
        return {"rope_type": "longrope", **values, **lists, **kept}
    if model.dynamic_rope is not None:
        return {"rope_type": "dynamic", "factor": model.dynamic_rope.factor}
    if model.linear_rope_factor != 1:
        return {"rope_type": "linear", "factor": model.linear_rope_factor}
    if model.yarn is None:
        return None
    values = {theirs: getattr(model.yarn, ours) for ours, theirs in YARN.items()}
    if model.yarn.attention_factor is not None:
        values["attention_factor"] = model.yarn.attention_factor
    if not model.yarn.truncate:
        values["truncate"] = False
    return {"rope_type": "yarn", **values}
