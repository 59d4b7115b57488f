"""MiniMax-M2, M2.1 and M2.5 (`minimax_m2`): Mixtral's experts chosen by sigmoids with a bias, norms
over all query and all key heads, and rotary positions of the first rotary_dim values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.choices import Score
from app.config import ModelConfig
from app.hf import config_json
from app.hf.rotary import head_width, rotary_of_part
from app.hf.their_config import TheirConfig

DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 5e6,
    "router_aux_loss_coef": 0.001,
}
# what other models of MiniMax have, where these values mean that M2 has not
ONLY: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "shared_intermediate_size": (0,),
    "layernorm_full_attention_beta": (1,),
    "layernorm_linear_attention_beta": (1,),
    "layernorm_mlp_beta": (1,),
}
SOFTMAX = 1  # of a layer in attn_type_list; 0 is linear attention


def read(config: TheirConfig) -> dict[str, Any]:
    """Return the fields of a model."""
    for name, values in ONLY.items():
        config.only(name, *values)
    if set(config.get("attn_type_list", ())) - {SOFTMAX}:
        raise config.refusal(f"attn_type_list has others than {SOFTMAX}, softmax attention")
    top_k = config.need("num_experts_per_tok")
    moe = {
        "num_experts": config.either("num_local_experts", "num_experts"),
        "top_k": top_k,
        "ffn_hidden_size": config.need("intermediate_size"),
        "score": Score.sigmoid,
        "norm_topk_prob": None if top_k > 1 else True,
        "bias_update_rate": 0.001,
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }
    return {
        **config_json.grouped(config, positions=_positions),
        "qk_norm": True,
        "qk_norm_whole": True,
        "moe": moe,
    }


def _positions(config: TheirConfig) -> dict[str, Any]:
    """Return rotary positions; partial_rotary_factor counts before rotary_dim."""
    width = max(1, head_width(config))
    return rotary_of_part(config, usual=config.get("rotary_dim", width) / width)


def written(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of its config.json that Mixtral lacks."""
    return {
        "rotary_dim": model.rope.width,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "attn_type_list": [SOFTMAX] * model.num_layers,
    }
