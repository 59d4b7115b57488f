"""Gemma 2 and 3, text: norms around attention and feed-forward, capped scores and logits, GeGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.choices import ActivationKind, BlockKind, NormKind
from app.config import ModelConfig
from app.hf import tables
from app.hf.config_json import Windows, attention_biases, dense, windows_by_interval
from app.hf.positions_by_type import dense_by_type, written_by_type
from app.hf.their_config import TheirConfig

LINES = (
    *tables.WHOLE_MODEL,
    *tables.GROUPED_ATTENTION,
    *tables.OUTPUTS,
    *tables.NORMS_AROUND,
)
OURS = {
    "block": BlockKind.norm_around,
    "norm": NormKind.rms_plus_one,
    "activation": ActivationKind.gelu_tanh,
    "embedding_scale": 0.0,
}
GELU = "gelu_pytorch_tanh"
THETA, LOCAL_THETA = 1e6, 1e4  # bases of rotary frequencies of Gemma 3
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}


def gemma2(config: TheirConfig) -> dict[str, Any]:
    """Gemma 2: every second layer has no window."""
    fields = dense(config, windows_by_interval(2))
    caps = {
        "attention_softcap": config.value("attn_logit_softcapping"),
        "logit_softcap": config.value("final_logit_softcapping"),
    }
    return {**fields, **OURS, **caps, **_attention(config, fields)}


def gemma3(config: TheirConfig) -> dict[str, Any]:
    """Gemma 3, text: norms of heads, and positions of their own in layers with a window."""
    local = config.get("rope_local_base_freq", LOCAL_THETA)
    theta = config.need("rope_theta")
    fields = dense_by_type(config, _windows(config), theta=theta, local_theta=local)
    config.only("attn_logit_softcapping")  # which `transformers` ignores
    caps = {"logit_softcap": config.value("final_logit_softcapping")}
    return {**fields, **OURS, **caps, **_attention(config, fields), "qk_norm": True}


def _attention(config: TheirConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return biases and the scale of scores; checks what else the two families share."""
    config.only("hidden_activation", GELU)
    config.only("use_bidirectional_attention", False)
    config.value("hidden_act")  # which `transformers` ignores
    scalar = config.need("query_pre_attn_scalar")
    width = fields["head_dim"] or fields["hidden_size"] // (fields["num_heads"] or 1)
    return {
        **attention_biases(config),
        "query_pre_attn_scalar": None if scalar == width else float(scalar),
    }


def _windows(config: TheirConfig) -> Windows:
    """Return the reader of windows: all layers but every sixth, or what sliding_window_pattern
    says.
    """
    interval = config.get("sliding_window_pattern", 6)
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
        raise config.unsupported("sliding_window_pattern")
    return windows_by_interval(interval)


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that both families add."""
    return {
        "hidden_act": GELU,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or model.head_width,
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
    }


def written_gemma3(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of Gemma 3's config.json that other families lack."""
    local = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
    return {**written(model), **written_by_type(model), "rope_local_base_freq": local}
