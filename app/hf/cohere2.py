"""Cohere2 (Command R7B, Command A): attention and feed-forward in parallel behind one LayerNorm."""

from __future__ import annotations

from typing import Any

from app.choices import BlockKind, LayerType, NormKind
from app.config import ModelConfig
from app.hf import config_json, tables
from app.hf.config_json import dense, windows_by_interval
from app.hf.their_config import TheirConfig

# `transformers` rotates neighbouring values of a head, we its two halves: rows are reordered
LINES = (
    *tables.WHOLE_MODEL,
    *tables.NEIGHBOURING_PAIRS,
    *tables.OUTPUTS,
    tables.NORM_BEFORE_ATTENTION,
)
SIZES = {**config_json.SIZES, "norm_eps": "layer_norm_eps"}


def cohere2(config: TheirConfig) -> dict[str, Any]:
    """Cohere2: every fourth layer has neither a window nor rotary positions."""
    interval = config.get("sliding_window_pattern", 4)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise config.unsupported("sliding_window_pattern")
    fields = dense(config, windows_by_interval(interval), sizes=SIZES)
    if fields["head_dim"] is not None:
        raise config.unsupported("head_dim")
    rotates: tuple[int, ...] = ()
    if fields["sliding_window"] is None:
        rotates = (0,)
    elif fields["layer_types"]:
        rotates = tuple(int(each is LayerType.sliding_attention) for each in fields["layer_types"])
    scale = config.need("logit_scale")
    return {
        **fields,
        **config_json.attention_biases(config),
        "block": BlockKind.parallel,
        "norm": NormKind.layer,
        "no_rope_layers": rotates,
        "logit_scale": None if scale == 1 else float(scale),
    }


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of Cohere2's config.json that other families lack."""
    return {
        "layer_norm_eps": model.norm_eps,
        "logit_scale": 1.0 if model.logit_scale is None else model.logit_scale,
    }
