"""Language models within models of text and images, as Qwen3.5 is published.

config.json has the language model's keys in a section, and files have its tensors under another
name; tensors of images are left out. An export is the language model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS: Mapping[object, str] = {  # model_type of the whole -> of the language model
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
SECTION = "text_config"
WITHIN, PLAIN = "model.language_model.", "model."  # begin names of its tensors: in files, alone
IMAGES = "model.visual."  # begins names of other tensors
VISION = "vision_config"
# keys of the whole that language models lack
OF_IMAGES = (VISION, "image_token_id", "video_token_id", "vision_start_token_id",
             "vision_end_token_id", "language_model_only")  # fmt: skip


def is_wrapped(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of text and images, and has a section of a language model."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in KINDS and isinstance(config.get(SECTION), dict)


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model; keys of the whole count where it has none."""
    if not is_wrapped(config):
        return config
    outside = {name: value for name, value in config.items() if name != SECTION}
    return {**outside, **config[SECTION], "model_type": KINDS[config["model_type"]]}


def exported(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the config.json of an export: of the language model, without keys of images."""
    if not is_wrapped(config):
        return config
    kept = {name: value for name, value in unwrapped(config).items() if name not in OF_IMAGES}
    return {**kept, "architectures": [architecture]}


def plain_name(name: str) -> str:
    """Return the name of a language model's tensor in files of that alone."""
    return PLAIN + name.removeprefix(WITHIN) if name.startswith(WITHIN) else name
