"""GPT-NeoX and Pythia: LayerNorm with biases, feed-forwards without a gate, and attention and
feed-forward in parallel, each behind a norm of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from app.choices import BlockKind, NormKind
from app.config import ModelConfig
from app.hf.activations import WRITTEN, activation
from app.hf.config_json import no_windows
from app.hf.rotary import PART, rotary_of_part, written_factor
from app.hf.their_config import TheirConfig

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "layer_norm_eps",
}
DEFAULTS = {"use_parallel_residual": True, "attention_bias": True}
# masks that `transformers` saved until version 4.31
REDUNDANT = (".attention.bias", ".attention.masked_bias")
THETA, FACTOR = "rotary_emb_base", "rotary_pct"  # older names of two keys of rotary positions


def read(config: TheirConfig) -> dict[str, Any]:
    """Read the fields of a model."""
    fields = config.renamed(SIZES)
    fields |= no_windows(config, fields["num_layers"])
    biased = config.get("attention_bias", False)
    parallel = config.get("use_parallel_residual", False)
    return {
        **fields,
        **_positions(config),
        "block": BlockKind.parallel_norms if parallel else BlockKind.norm_before,
        "norm": NormKind.layer_bias,
        "activation": activation(config, "gelu"),
        "mlp_gate": False,
        "mlp_bias": True,
        "qkv_bias": biased,
        "attn_out_bias": biased,
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "moe": None,
    }


def _positions(config: TheirConfig) -> dict[str, Any]:
    """Return rotary positions; outside of a section, base and part have names of their own."""
    heads = max(1, config.need("num_attention_heads"))
    config.only("head_dim", config.need("hidden_size") // heads)
    outside = {"rope_theta": config.get(THETA, 10000.0), PART: config.get(FACTOR, 0.25)}
    for name, value in outside.items():
        config.only(name, value)
    return rotary_of_part(replace(config, values={**config.values, **outside}))


def written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that other families lack."""
    return {
        "hidden_act": WRITTEN[model.activation],
        "layer_norm_eps": model.norm_eps,
        "mlp_bias": False,  # is always there
        "use_parallel_residual": model.block is BlockKind.parallel_norms,
        THETA: model.rope_theta,
        FACTOR: written_factor(model),
    }
