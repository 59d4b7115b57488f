"""Convert config.json of a Hugging Face model to a `ModelConfig`, and back.

Both spellings of rotary positions are read: `rope_theta` with `rope_scaling` (`transformers` 4) and
`rope_parameters` (version 5). The former is written: both versions and other programs read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.choices import LayerType
from app.config import LinearAttentionConfig, MLAConfig, ModelConfig, MoEConfig, YarnConfig
from app.config.attention import DynamicRopeConfig, Llama3RopeConfig, LongRopeConfig
from app.hf.rotary import rotary, written_scaling
from app.hf.their_config import TheirConfig

# our field -> theirs
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
FULL, SLIDING, LINEAR = (each.value for each in LayerType)
LATENT_EPS = 1e-6  # `transformers` uses it for norms of latents, whatever rms_norm_eps is


# returns the fields of sliding windows, given the number of layers; those of rotary positions
Windows = Callable[[TheirConfig, int], dict[str, Any]]
Positions = Callable[[TheirConfig], dict[str, Any]]


def no_windows(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of models in which all layers see all tokens."""
    return _windows(config, [FULL] * layers, None, per_layer=False)


def windows_everywhere(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of models whose sliding_window, unless null, is that of all layers."""
    window = config.value("sliding_window")
    return _windows(config, [_type(window)] * layers, window, per_layer=False)


def windows_by_layer(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of models whose layer_types may exempt layers from sliding_window."""
    window = config.value("sliding_window")
    return _windows(config, [_type(window)] * layers, window, per_layer=True)


def windows_from_layer(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of models with use_sliding_window, in layers from max_window_layers on
    unless layer_types lists others.
    """
    window, first = _used_window(config), config.need("max_window_layers")
    usual = [FULL if layer < first else _type(window) for layer in range(layers)]
    return _windows(config, usual, window, per_layer=True)


def windows_by_interval(interval: int) -> Windows:
    """Return the reader of models whose layers have sliding_window, except every `interval`-th,
    unless layer_types lists others.
    """

    def windows(config: TheirConfig, layers: int) -> dict[str, Any]:
        window = config.value("sliding_window")
        usual = [_type(window) if (layer + 1) % interval else FULL for layer in range(layers)]
        return _windows(config, usual, window, per_layer=True)

    return windows


def windows_if_used(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of models with use_sliding_window, which then holds for all layers."""
    window = _used_window(config)
    return _windows(config, [_type(window)] * layers, window, per_layer=False)


def windows_of_odd_layers(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of models with use_sliding_window, in every other layer below
    max_window_layers unless layer_types lists others.
    """
    window, below = _used_window(config), config.need("max_window_layers")
    slides = [layer % 2 == 0 and layer < below for layer in range(layers)]
    usual = [_type(window) if each else FULL for each in slides]
    return _windows(config, usual, window, per_layer=True)


def _used_window(config: TheirConfig) -> int | None:
    window: int | None = config.value("sliding_window")
    return window if config.get("use_sliding_window", False) else None


def rotated_layers(model: ModelConfig) -> list[int]:
    """Return 1 for each layer with rotary positions, 0 for others."""
    specs = model.layer_specs[: model.num_layers]
    return [int(spec.attention.rope is not None) for spec in specs]


def layer_types(model: ModelConfig) -> list[str]:
    """Return the type of each layer's attention."""
    specs = (spec.attention for spec in model.layer_specs[: model.num_layers])
    return [LINEAR if spec.linear is not None else _type(spec.window) for spec in specs]


def _type(window: int | None) -> str:
    return FULL if window is None else SLIDING


def _windows(
    config: TheirConfig, usual: Sequence[str], window: int | None, *, per_layer: bool
) -> dict[str, Any]:
    """Return the fields of layers of types `usual`; `per_layer`: unless layer_types has others."""
    types = config.get("layer_types", usual)
    known = {FULL, SLIDING} if per_layer else set(usual)
    if set(types) - known:
        raise config.refusal(f"layer_types has others than {' and '.join(sorted(known))}")
    if len(types) != len(usual):
        rule = f"layer_types has {len(types)} of num_hidden_layers={len(usual)}"
        raise config.refusal(rule)
    if SLIDING not in types:
        return {"sliding_window": None, "layer_types": ()}
    if window is None:
        raise config.refusal(f"layer_types has {SLIDING} without a sliding_window in use")
    same = set(types) == {SLIDING}
    return {
        "sliding_window": window,
        "layer_types": () if same else tuple(map(LayerType, types)),
    }


def common(
    config: TheirConfig,
    windows: Windows = no_windows,
    positions: Positions | None = None,
    *,
    sizes: Mapping[str, str] = SIZES,
    latent: bool = False,
) -> dict[str, Any]:
    """Return the fields that all families have; `latent`: with multi-head latent attention.

    `positions` reads rotary positions that differ between layers.
    """
    fields = config.renamed(sizes)
    fields |= windows(config, fields["num_layers"])
    fields["num_kv_heads"] = config.get("num_key_value_heads", fields["num_heads"])
    fields["tie_embeddings"] = bool(config.get("tie_word_embeddings", False))
    if positions is not None:
        return fields | positions(config)
    return fields | rotary(config, latent=latent)


def grouped(
    config: TheirConfig,
    windows: Windows = no_windows,
    positions: Positions | None = None,
    *,
    sizes: Mapping[str, str] = SIZES,
) -> dict[str, Any]:
    """Return the fields of a model with grouped-query attention."""
    fields = common(config, windows, positions, sizes=sizes)
    usual, rest = divmod(fields["hidden_size"], fields["num_heads"] or 1)  # 0 is refused later
    width = config.get("head_dim", usual)
    fields["head_dim"] = None if width == usual and not rest else width
    return fields


def dense(
    config: TheirConfig,
    windows: Windows = no_windows,
    positions: Positions | None = None,
    *,
    sizes: Mapping[str, str] = SIZES,
) -> dict[str, Any]:
    """Return the fields of a model without experts."""
    fields = grouped(config, windows, positions, sizes=sizes)
    return {**fields, "ffn_hidden_size": config.need("intermediate_size"), "moe": None}


def attention_biases(config: TheirConfig) -> dict[str, Any]:
    """Return the fields of families whose attention_bias is one of all four projections."""
    biased = config.get("attention_bias", False)
    return {"qkv_bias": biased, "attn_out_bias": biased}


def mlp_bias(config: TheirConfig) -> dict[str, Any]:
    """Return the field of biases of feed-forwards."""
    return {"mlp_bias": config.get("mlp_bias", False)}


def llama(config: TheirConfig) -> dict[str, Any]:
    """Llama 2 and 3."""
    return {**dense(config), **attention_biases(config), **mlp_bias(config)}


def mistral(config: TheirConfig) -> dict[str, Any]:
    """Mistral."""
    return dense(config, windows_everywhere)


def ministral(config: TheirConfig) -> dict[str, Any]:
    """Ministral."""
    return dense(config, windows_by_layer)


def smollm3(config: TheirConfig) -> dict[str, Any]:
    """SmolLM3: every fourth layer has no rotary positions, and only such layers have windows."""
    layers, interval = config.need("num_hidden_layers"), config.value("no_rope_layer_interval")
    rotates = config.value("no_rope_layers")
    if rotates is None and not interval:
        raise config.refusal("no_rope_layer_interval is missing")
    if rotates is None:
        rotates = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotates) != layers:
        raise config.refusal(f"no_rope_layers has {len(rotates)} of num_hidden_layers={layers}")

    def windows(config: TheirConfig, layers: int) -> dict[str, Any]:
        window = _used_window(config)
        types = [FULL if rotated else _type(window) for rotated in rotates]
        return _windows(config, types, window, per_layer=True)

    every = all(rotates)
    fields = {**dense(config, windows), **attention_biases(config), **mlp_bias(config)}
    return {**fields, "no_rope_layers": () if every else tuple(rotates)}


def qwen2(config: TheirConfig) -> dict[str, Any]:
    """Qwen2 and Qwen2.5, dense."""
    return {**dense(config, windows_from_layer), "qkv_bias": True}


def qwen3(config: TheirConfig) -> dict[str, Any]:
    """Qwen3, dense."""
    fields = {**dense(config, windows_from_layer), **attention_biases(config)}
    return {**fields, "qk_norm": True}


def mixtral(config: TheirConfig) -> dict[str, Any]:
    """Mixtral."""
    moe = {
        "num_experts": config.either("num_local_experts", "num_experts"),
        "top_k": config.need("num_experts_per_tok"),
        "ffn_hidden_size": config.need("intermediate_size"),
        "aux_loss_coeff": config.get("router_aux_loss_coef", 0.0),
    }
    return {**grouped(config, windows_everywhere), "moe": moe}


def written(model: ModelConfig, family: str, architecture: str) -> dict[str, Any]:
    """Return the config.json of a model, without special tokens, and without context lengths that
    change nothing.
    """
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": family,
        "hidden_act": "silu",
        "attention_bias": model.attn_out_bias,
        "mlp_bias": model.mlp_bias,
        "attention_dropout": 0.0,
        "initializer_range": model.init_std,
        "use_cache": True,
        "pad_token_id": None,  # some classes have a default beyond small vocabularies
        **{theirs: getattr(model, ours) for ours, theirs in SIZES.items()},
        "intermediate_size": model.ffn_hidden_size,
        "num_key_value_heads": model.num_kv_heads,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": written_scaling(model),
    }
    if model.dynamic_rope is not None:
        found["max_position_embeddings"] = model.dynamic_rope.original_length
    if model.mla is None:
        found["head_dim"] = model.head_width
    else:
        found |= {theirs: getattr(model.mla, ours) for ours, theirs in LATENT.items()}
    return found


def written_layers(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of what layers differ in, of which a family has some."""
    types = layer_types(model)
    return {
        "use_sliding_window": SLIDING in types,
        "sliding_window": model.sliding_window,
        "max_window_layers": [*types, SLIDING].index(SLIDING),
        "layer_types": types,
        "no_rope_layers": rotated_layers(model),
    }


def written_mixtral(moe: MoEConfig) -> dict[str, Any]:
    """Return the keys of experts in Mixtral's config.json."""
    return {
        "intermediate_size": moe.ffn_hidden_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
    }


SECTIONS = {
    "moe": MoEConfig,
    "mla": MLAConfig,
    "linear_attention": LinearAttentionConfig,
    "yarn": YarnConfig,
    "llama3_rope": Llama3RopeConfig,
    "longrope": LongRopeConfig,
    "dynamic_rope": DynamicRopeConfig,
}


def as_model(fields: Mapping[str, Any], name: str) -> ModelConfig:
    """Build a `ModelConfig` from fields, with its sections as nested fields. Raises ConfigError."""
    made = {
        key: SECTIONS[key](**value) if isinstance(value, dict) else value
        for key, value in fields.items()
    }
    return ModelConfig(**{"name": name, "moe": None, **made})
