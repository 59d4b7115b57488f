"""StarCoder2: LayerNorm with biases, and feed-forwards without a gate."""

from __future__ import annotations

from typing import Any

from app.choices import NormKind
from app.config import ModelConfig
from app.hf import config_json, tables
from app.hf.activations import WRITTEN, activation
from app.hf.config_json import dense, windows_everywhere
from app.hf.their_config import TheirConfig

LINES = (
    *tables.WHOLE_MODEL,
    *tables.GROUPED_ATTENTION,
    *tables.STARCODER2,
    *tables.NORMS_WITH_BIASES,
    tables.FINAL_BIAS,
)
SIZES = {**config_json.SIZES, "norm_eps": "norm_epsilon"}
DEFAULTS = {"num_key_value_heads": 2, "tie_word_embeddings": True, "use_bias": True}


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model."""
    fields = dense(config, windows_everywhere, sizes=SIZES)
    biased = config.get("use_bias", False)
    return {
        **fields,
        "norm": NormKind.layer_bias,
        "activation": activation(config, "gelu_pytorch_tanh"),
        "mlp_gate": False,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), biased),
    }


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that other families lack."""
    return {
        "hidden_act": WRITTEN[model.activation],
        "norm_epsilon": model.norm_eps,
        "use_bias": model.mlp_bias,
        # use_bias says it
        "attention_bias": False,
        "mlp_bias": False,
    }
