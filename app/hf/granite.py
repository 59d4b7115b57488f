"""Granite 3 (IBM), dense and with experts: factors on embeddings, attention scores, outputs of
attention and feed-forwards, and logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from app.config import ModelConfig, MoEConfig
from app.hf.config_json import attention_biases, dense, grouped, mlp_bias
from app.hf.their_config import TheirConfig

MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
MOE_DEFAULTS = {**MULTIPLIERS, "router_aux_loss_coef": 0.001}


def granite(config: TheirConfig) -> dict[str, Any]:
    """Read a dense model."""
    fields = dense(config)
    return {**fields, **attention_biases(config), **mlp_bias(config), **_factors(config, fields)}


def granitemoe(config: TheirConfig) -> dict[str, Any]:
    """Read a model with experts."""
    moe = {
        "num_experts": config.either("num_local_experts", "num_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("intermediate_size"),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }
    fields = grouped(config)
    return {**fields, **attention_biases(config), **_factors(config, fields), "moe": moe}


def _factors(config: TheirConfig, fields: dict[str, Any]) -> dict[str, Any]:
    found = {name: float(config.need(name)) for name in MULTIPLIERS}
    for name, value in found.items():
        if value <= 0:
            raise config.unsupported(name)
    scalar = _scalar(found["attention_multiplier"])
    width = fields["head_dim"] or fields["hidden_size"] // (fields["num_heads"] or 1)
    return {
        "embedding_scale": _unless_one(found["embedding_multiplier"]),
        "query_pre_attn_scalar": None if scalar == width else scalar,
        "residual_scale": _unless_one(found["residual_multiplier"]),
        "logit_scale": _unless_one(1 / found["logits_scaling"]),
    }


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor


def _scalar(factor: float) -> float:
    """Return the number whose root divides scores; a whole one where rounding alone differs."""
    scalar = factor**-2
    whole = round(scalar)
    return float(whole) if math.isclose(scalar, whole, rel_tol=1e-14) else scalar


def _inverse(read: Callable[[float], float], value: float, near: float) -> float:
    """Return the shortest number near `near` that `read` makes `value` of; `near` if none does."""
    shorter = (float(f"{near:.{digits}g}") for digits in range(1, 17))
    around = (math.nextafter(near, 0), near, math.nextafter(near, math.inf))
    return next((each for each in (*shorter, *around) if each and read(each) == value), near)


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the four factors of config.json."""
    scalar = float(model.query_pre_attn_scalar or model.head_width)
    logits = 1.0 if model.logit_scale is None else model.logit_scale
    return {
        "embedding_multiplier": model.embedding_factor,
        "attention_multiplier": _inverse(_scalar, scalar, scalar**-0.5),
        "residual_multiplier": model.residual_factor,
        "logits_scaling": _inverse(lambda factor: 1 / factor, logits, 1 / logits),
    }


def written_moe(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in config.json."""
    return {
        "intermediate_size": moe.ffn_hidden_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
    }
