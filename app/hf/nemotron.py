"""Nemotron-3 and -4, Minitron: LayerNorm scaled by 1 + its weight, with a bias, and feed-forwards
of ReLU² without a gate.
"""

from __future__ import annotations

from typing import Any

from app.choices import NormKind
from app.config import ModelConfig
from app.hf import config_json, tables
from app.hf.activations import WRITTEN, activation
from app.hf.config_json import attention_biases, dense, mlp_bias
from app.hf.rotary import PART, rotary_of_part, written_factor
from app.hf.their_config import TheirConfig

LINES = (
    *tables.WHOLE_MODEL,
    *tables.GROUPED_ATTENTION,
    *tables.NEMOTRON,
    *tables.NORMS_WITH_BIASES,
    tables.FINAL_BIAS,
)
SIZES = {**config_json.SIZES, "norm_eps": "norm_eps"}


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model."""
    fields = dense(config, positions=lambda said: rotary_of_part(said, usual=0.5), sizes=SIZES)
    return {
        **fields,
        **attention_biases(config),
        **mlp_bias(config),
        "norm": NormKind.layer_plus_one,
        "activation": activation(config, "relu2"),
        "mlp_gate": False,
    }


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that other families lack."""
    return {
        "hidden_act": WRITTEN[model.activation],
        "norm_eps": model.norm_eps,
        PART: written_factor(model),
    }
