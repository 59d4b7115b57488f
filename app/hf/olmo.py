"""OLMo-2, OLMo-3 and OLMoE: norms over all query and all key heads; of the former two also norms
behind attention and feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.choices import BlockKind
from app.config import ModelConfig, MoEConfig
from app.hf import config_json, tables
from app.hf.positions_by_type import dense_by_type, written_by_type
from app.hf.their_config import TheirConfig

LINES = (
    *tables.WHOLE_MODEL,
    *tables.GROUPED_ATTENTION,
    *tables.OUTPUTS,
    *tables.NORMS_BEHIND,
)
OURS = {"block": BlockKind.norm_after, "qk_norm": True, "qk_norm_whole": True}


def olmo2(config: TheirConfig) -> dict[str, Any]:
    """OLMo-2."""
    return {**config_json.dense(config), **config_json.attention_biases(config), **OURS}


THETA = 500000.0  # base of rotary frequencies that sections of OLMo-3 lack


def olmo3(config: TheirConfig) -> dict[str, Any]:
    """OLMo-3: every fourth layer has no window, and only such layers may have YaRN."""
    theta = config.need("rope_theta")
    sections = config.get("rope_parameters", {})
    if theta != THETA and "rope_theta" not in (sections.get(config_json.SLIDING) or {}):
        what = "without rope_parameters is not that of layers with windows in transformers 5"
        raise config.refusal(f"{config.said('rope_theta')} {what}")
    windows = config_json.windows_by_interval(4)
    fields = dense_by_type(config, windows, theta=theta, local_theta=THETA)
    return {**fields, **config_json.attention_biases(config), **OURS}


def written_olmo3(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of OLMo-3's config.json that other families lack."""
    return written_by_type(model)


def olmoe(config: TheirConfig) -> dict[str, Any]:
    """OLMoE: norms over all query and all key heads."""
    moe = {
        "num_experts": config.either("num_experts", "num_local_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("intermediate_size"),
        "pre_softmax": not config.get("norm_topk_prob", False),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }
    fields = {**config_json.grouped(config), **config_json.attention_biases(config)}
    return {**fields, "qk_norm": True, "qk_norm_whole": True, "moe": moe}


def written_olmoe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in OLMoE's config.json."""
    return {
        "intermediate_size": moe.ffn_hidden_size,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": not moe.pre_softmax,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "clip_qkv": None,
    }
