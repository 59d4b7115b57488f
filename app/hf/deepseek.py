"""DeepSeek-V2, V3 and R1."""

from __future__ import annotations

from typing import Any

from app.choices import Balance, Score
from app.config import MoEConfig
from app.hf import config_json
from app.hf.their_config import TheirConfig


def deepseek_v2(config: TheirConfig) -> dict[str, Any]:
    """DeepSeek-V2: probabilities are not normalised, groups are scored by their best expert."""
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    limited = config.get("topk_method", "greedy") == "group_limited_greedy"
    groups = _groups(config, needed=limited)
    moe: dict[str, Any] = {"pre_softmax": True, "score": Score.softmax}
    if limited:
        moe |= {**groups, "group_best": 1}
    moe["num_experts"] = config.either("n_routed_experts", "num_experts")
    return {**_deepseek(config, moe), **config_json.mlp_bias(config)}


def deepseek_v3(config: TheirConfig) -> dict[str, Any]:
    """DeepSeek-V3: sigmoid scores, with a bias for the choice."""
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    config.only("rope_interleave", True)
    return _deepseek(config, sigmoid_router(config))


def sigmoid_router(config: TheirConfig) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's router."""
    several = config.need("num_experts_per_tok") > 1
    normalizes = bool(config.value("norm_topk_prob"))  # null there is false
    groups = _groups(config, needed=True)
    moe: dict[str, Any] = {"score": Score.sigmoid, "bias_update_rate": 0.001}
    moe["norm_topk_prob"] = None if normalizes is several else normalizes
    if groups["groups"] > 1:
        moe |= {**groups, "group_best": 2}
    else:
        config.only("topk_group", 1)  # 0 would give all tokens the same experts
    moe["num_experts"] = config.either("n_routed_experts", "num_local_experts")
    return moe


def _groups(config: TheirConfig, needed: bool) -> dict[str, Any]:
    take = config.need if needed else config.value
    return {"groups": take("n_group"), "topk_groups": take("topk_group")}


def _deepseek(config: TheirConfig, moe: dict[str, Any]) -> dict[str, Any]:
    config.only("moe_layer_freq", 1)
    rotated = config.need("qk_rope_head_dim")
    config.only("head_dim", rotated)  # there the width of rotary parts
    config.only("qk_head_dim", rotated + config.need("qk_nope_head_dim"))
    moe |= deepseek_experts(config)
    latent = {**config.renamed({k: v for k, v in config_json.LATENT.items() if k != "q_lora_rank"})}
    latent["q_lora_rank"] = config.get("q_lora_rank", None)
    latent["norm_eps"] = (
        None if config.need("rms_norm_eps") == config_json.LATENT_EPS else config_json.LATENT_EPS
    )
    dense_ffn = config.need("intermediate_size")
    fields = config_json.common(config, latent=True)
    return {**fields, "ffn_hidden_size": dense_ffn, "mla": latent, "moe": moe}


def deepseek_experts(config: TheirConfig) -> dict[str, Any]:
    """Return the sizes of DeepSeek's experts, and losses."""
    ffn = config.need("moe_intermediate_size")
    return {
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": ffn,
        "first_k_dense": config.get("first_k_dense_replace", 0),
        "shared_ffn_hidden_size": ffn * config.get("n_shared_experts", 0),
        "routed_scale": config.get("routed_scaling_factor", 1.0),
        "aux_loss_coeff": config.get("aux_loss_alpha", 0.0001),
        "balance": Balance.sequence if config.get("seq_aux", True) else Balance.microbatch,
    }


def written_deepseek(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in the config.json of DeepSeek-V2 or -V3."""
    sigmoid = moe.score is Score.sigmoid
    limited = "group_limited_greedy" if moe.groups else "greedy"
    return {
        "moe_intermediate_size": moe.ffn_hidden_size,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn_hidden_size // moe.ffn_hidden_size,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": moe.first_k_dense,
        "moe_layer_freq": 1,
        "n_group": moe.groups or 1,
        "topk_group": moe.topk_groups or 1,
        "topk_method": "noaux_tc" if sigmoid else limited,
        "scoring_func": moe.score.value,
        "norm_topk_prob": moe.normalizes_sigmoids,
        "routed_scaling_factor": 1.0 if moe.routed_scale is None else moe.routed_scale,
        "aux_loss_alpha": moe.aux_loss_coeff,
        "seq_aux": moe.balance is Balance.sequence,
    }
