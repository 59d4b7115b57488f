"""EXAONE-4: norms behind attention and feed-forward; no rotary positions in layers without a window
among layers with one.
"""

from __future__ import annotations

from typing import Any

from app.choices import BlockKind, LayerType
from app.config import ModelConfig
from app.hf import tables
from app.hf.config_json import dense, layer_types, windows_by_interval
from app.hf.their_config import TheirConfig

LINES = (
    *tables.WHOLE_MODEL,
    *tables.GROUPED_ATTENTION,
    *tables.OUTPUTS,
    *tables.NORMS_BEHIND,
)


def exaone4(config: TheirConfig) -> dict[str, Any]:
    """EXAONE-4: every fourth layer has no window, unless sliding_window_pattern says otherwise."""
    window, interval = config.value("sliding_window"), config.value("sliding_window_pattern")
    listed = config.value("layer_types") is not None
    whole = isinstance(interval, int) and not isinstance(interval, bool) and interval > 0
    if not (listed or whole or window is None):
        raise config.unsupported("sliding_window_pattern")
    fields = dense(config, windows_by_interval(interval if whole else 1))
    rotates: tuple[int, ...] = ()
    if window is not None and fields["sliding_window"] is None:
        rotates = (0,)
    elif fields["layer_types"]:
        rotates = tuple(int(each is LayerType.sliding_attention) for each in fields["layer_types"])
    block = {"block": BlockKind.norm_after, "qk_norm": True}
    return {**fields, **block, "no_rope_layers": rotates}


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of layers; where none has a window, null for sliding_window rotates all."""
    return {
        "sliding_window": model.sliding_window,
        "sliding_window_pattern": None,
        "layer_types": layer_types(model),
    }
