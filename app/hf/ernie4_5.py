"""ERNIE 4.5, dense and with experts: neighbouring values of its heads rotate, so that rows of
queries and keys are reordered. The dense models are then Llamas.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from app.choices import Score
from app.config import ModelConfig, MoEConfig
from app.hf import config_json, tables
from app.hf.their_config import TheirConfig

THETA = 500000.0
NORM_MIN = 1e-12  # of the sum of chosen scores
DENSE_LINES = (*tables.WHOLE_MODEL, *tables.EVERY_LAYER, *tables.NEIGHBOURING_PAIRS)
LINES = (*DENSE_LINES, *tables.ERNIE_EXPERTS)
DENSE_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "rope_theta": THETA,
}
DEFAULTS = {
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rope_theta": THETA,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "router_aux_loss_coef": 0.001,
}


def dense(config: TheirConfig) -> dict[str, Any]:
    """ERNIE 4.5 without experts: use_bias is of all linear layers of a decoder layer."""
    biased = config.get("use_bias", False)
    biases = dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), biased)
    return {**config_json.dense(config), **biases}


def with_experts(config: TheirConfig) -> dict[str, Any]:
    """ERNIE 4.5 with experts; use_bias would also be of the head."""
    config.only("moe_norm_min", NORM_MIN)
    config.only("moe_gate", "topk")
    config.only("moe_use_aux_free", True)
    ffn = config.need("moe_intermediate_size")
    moe = {
        "num_experts": config.either("moe_num_experts", "num_experts"),
        "top_k": config.either("moe_k", "num_experts_per_tok"),
        "ffn_hidden_size": ffn,
        "shared_ffn_hidden_size": ffn * config.need("moe_num_shared_experts"),
        "score": Score.softmax_bias,
        "bias_update_rate": 0.001,
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
        **_sparse_layers(config),
    }
    dense_ffn = config.need("intermediate_size")
    return {**config_json.grouped(config), "ffn_hidden_size": dense_ffn, "moe": moe}


def _sparse_layers(config: TheirConfig) -> dict[str, Any]:
    """Return which layers have experts: every moe_layer_interval-th from moe_layer_start_index to
    moe_layer_end_index, of which −1 is the last layer.
    """
    layers, step = config.need("num_hidden_layers"), config.need("moe_layer_interval")
    start, end = config.need("moe_layer_start_index"), config.get("moe_layer_end_index", -1)
    if not isinstance(end, int) or isinstance(end, bool) or step < 1:
        raise config.unsupported("moe_layer_interval" if step < 1 else "moe_layer_end_index")
    end = layers - 1 if end == -1 else end
    routed = [layer for layer in range(start, layers) if (layer + 1) % step == 0 and layer <= end]
    if not routed:
        raise config.refusal("no layer has experts")
    later = range(routed[0], layers, step)
    return {
        "every_n": step,
        "first_k_dense": routed[0],
        "dense_layers": tuple(layer for layer in later if layer > end),
    }


def written_moe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in config.json."""
    return {
        "moe_num_experts": moe.num_experts,
        "moe_k": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden_size,
        "moe_num_shared_experts": moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
        "moe_norm_min": NORM_MIN,
        "router_aux_loss_coef": moe.aux_loss_coeff,
    }


def written(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of layers in config.json."""
    assert model.moe is not None
    routed = [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]
    steps = {later - layer for layer, later in pairwise(routed)}
    return {
        "use_bias": model.qkv_bias,
        "moe_layer_start_index": routed[0],
        "moe_layer_end_index": routed[-1],
        "moe_layer_interval": min(steps, default=1),
    }
