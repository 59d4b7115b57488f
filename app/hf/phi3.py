"""Phi-3, Phi-3.5-mini, Phi-4 and Phi-4-mini: queries, keys and values in one tensor, gate and up in
another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from app.config import ModelConfig
from app.hf import tables
from app.hf.config_json import dense, windows_everywhere
from app.hf.rotary import PART, rotary_of_part, written_factor
from app.hf.their_config import TheirConfig

LINES = (*tables.WHOLE_MODEL, *tables.PHI3)
DEFAULTS = {"original_max_position_embeddings": 4096}
TYPE, LONGROPE = ("rope_type", "type"), "longrope"
OLD = ("su", "yarn")  # earlier names of `longrope` in this family


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model."""
    sections = {
        name: _renamed(value)
        for name, value in config.values.items()
        if name in ("rope_scaling", "rope_parameters") and value is not None
    }
    config = replace(config, values={**config.values, **sections})
    return dense(config, windows_everywhere, lambda said: rotary_of_part(said, usual=1.0))


def _renamed(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of rotary positions with the present name of their type."""
    return {
        key: LONGROPE if key in TYPE and value in OLD else value for key, value in section.items()
    }


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that other families lack."""
    found: dict[str, Any] = {PART: written_factor(model)}
    if (longrope := model.longrope) is not None:
        found["original_max_position_embeddings"] = longrope.original_length
    return found
