"""GLM-4.7-Flash (`glm4_moe_lite`): DeepSeek-V3's layers, where a list says which have experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.config import ModelConfig
from app.hf import deepseek
from app.hf.their_config import TheirConfig

DENSE, SPARSE = "dense", "sparse"
DEFAULTS = {
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model; without mlp_layer_types all layers but the first have experts."""
    fields = deepseek.deepseek_v3(config)
    layers = fields["num_layers"]
    kinds = config.get("mlp_layer_types", [DENSE, *[SPARSE] * (layers - 1)])
    if len(kinds) != layers:
        raise config.refusal(f"mlp_layer_types has {len(kinds)} of num_hidden_layers={layers}")
    if set(kinds) - {DENSE, SPARSE}:
        raise config.refusal(f"mlp_layer_types has others than {DENSE} and {SPARSE}")
    first = next((layer for layer, kind in enumerate(kinds) if kind == SPARSE), layers)
    later = [layer for layer, kind in enumerate(kinds) if kind == DENSE and layer > first]
    moe = {**fields["moe"], "first_k_dense": first, "dense_layers": tuple(later)}
    return {**fields, "moe": moe}


def written(model: ModelConfig) -> Mapping[str, Any]:
    """Return the key that says which layers have experts."""
    layers = map(model.is_moe_layer, range(model.num_layers))
    return {"mlp_layer_types": [SPARSE if routed else DENSE for routed in layers]}
