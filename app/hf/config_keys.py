"""Keys of config.json that import does not read: keys that must have a neutral value, and keys that
cannot change logits.

Every key that `transformers` knows in a supported family is either read or listed here; tests
compare these tables with the installed version. Any other key of a file is ignored, as
`transformers` ignores it, and named in a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.errors import ConfigError
from app.hf.behind import OF_MINIMAX
from app.hf.their_config import TheirConfig, shortened

# Values besides null with which a key changes nothing; any other is refused.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    # biases and clipping that a family's layers lack
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_out_bias": (False,),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "clip_qkv": (),
    "swiglu_alpha": (),
    "swiglu_limit": (),
    "mlp_gate_softcap": (),
    "mlp_up_softcap": (),
    # attention to a part of the tokens, in families that have none
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "kv_sharing_modes": (),
    # rotary positions of a part of a head
    "partial_rotary_factor": (1,),
    # of Phi-4-mini's own code
    "lm_head_bias": (False,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    # layers that differ from each other, or another model inside
    "per_layer_config": ({},),
    "pruned_heads": ({},),
    "text_config": (),
    "text_encoder": (),
    "decoder": (),
    "encoder": (),
    "generator": (),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    # weights in other files, or put together otherwise
    "transformers_weights": (),
    "extra_files": ([],),
    "extra_config_files": ([],),
    "fusion_config": ({},),
    "compression_config": ({},),
    # attributes of the configuration class, which a file would replace
    **dict.fromkeys(
        (
            "allow_global_per_layer_attribute_access", "attribute_map", "base_config_key",
            "base_model_ep_plan", "base_model_fsdp_plan", "base_model_pp_plan",
            "base_model_tp_plan", "default_rope_type", "default_theta",
            "ignore_keys_at_rope_validation", "is_heterogeneous", "keys_to_ignore_at_inference",
            "per_layer_attributes", "serialize_explicit_per_layer_config", "sub_configs",
            "sub_configs_defaults", "_rope_type_labels",
        ),
        (),
    ),
}  # fmt: skip

# reason -> keys that no value of which changes logits
REASONS: Mapping[str, tuple[str, ...]] = {
    "names the model, the file or the program that wrote it": (
        "architectures", "transformers_version", "name_or_path", "_name_or_path", "_commit_hash",
        "_auto_class", "tokenizer_class", "language",
    ),
    "every tensor has a type of its own": ("dtype", "torch_dtype", "use_bfloat16"),
    "random initial weights, which the files replace": ("initializer_range",),
    "what a call returns besides logits": (
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
        "use_return_dict", "tie_last_hidden_states", "torchscript",
    ),
    "speed and memory": (
        "use_cache", "pretraining_tp", "ep_size", "chunk_size_feed_forward",
        "gradient_checkpointing", "attn_implementation", "experts_implementation",
        "_attn_implementation", "_experts_implementation", "_attn_implementation_internal",
        "_experts_implementation_internal", "_attn_implementation_autoset",
        "_flash_attn_2_enabled", "distributed_config",
    ),
    "labels of classifiers": (
        "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
        "task_specific_params", "tf_legacy_loss", "classifier_dropout",
    ),
    "ids of tokens, for texts": (
        "pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id",
        "unk_token_id", "mask_token_id", "decoder_start_token_id", "prefix", "is_decoder",
    ),
    "defaults of text generation": (
        "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids",
        "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
        "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff",
        "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
        "forced_eos_token_id", "length_penalty", "max_length", "min_length",
        "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
        "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
        "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
    ),
}  # fmt: skip
WITHOUT_EFFECT = {key: reason for reason, keys in REASONS.items() for key in keys}
WITHOUT_EFFECT_IN: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": {"max_window_layers": "use_sliding_window is for all layers or none"},
    "ernie4_5_moe": {"moe_capacity": "no token is dropped"},
    "minimax_m2": {
        "mlp_intermediate_size": "there are no dense layers",
        "shared_moe_mode": "there are no shared experts",
        **OF_MINIMAX,
    },
    "gemma3_text": {"_sliding_window_pattern": "sliding_window_pattern has its number"},
}
# training noise of `transformers` that is not applied here; a message says so if it is not 0
NOT_APPLIED = ("attention_dropout", "residual_dropout", "router_jitter_noise", "resid_pdrop",
               "embd_pdrop", "embedding_dropout", "hidden_dropout")  # fmt: skip
# keys of rotary positions of all types; a key that the given type does not use is refused
ROTARY = frozenset((
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "factor",
    "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
    "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mscale",
    "mscale_all_dim", "truncate", "mrope_section",
))  # fmt: skip
AUTO_MAP = "auto_map"
# of quantization_config, where quant_method is fp8
FP8_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "activation_scheme": ("dynamic", "static"),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "expert_dtype": ("fp8",),
}
# where it is compressed-tensors: of the section and the weights of its groups
COMPRESSED_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "format": ("float-quantized", "naive-quantized"),
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "dynamic": (False,),
}
KV_CACHE = "kv_cache_scheme"  # of keys and values, which are not quantised here
QUANTISED_WITHOUT_EFFECT = frozenset((
    "dequantize", "modules_to_convert", "modules_to_not_convert", "ignored_layers", "scale_fmt",
    "ignore", "quantization_status", "global_compression_ratio", "version", "run_compressed",
))  # fmt: skip


def check_neutral(config: TheirConfig) -> None:
    """Raise ConfigError for a key that is not read and has a value other than its neutral ones."""
    for name, values in NEUTRAL.items():
        if name in config.values.keys() - config.asked:
            config.only(name, *values)


def check_rotary(section: TheirConfig, kind: str) -> None:
    """Raise ConfigError for a key that rotary positions of this type do not use."""
    for name in section.unread():
        if name in ROTARY:
            what = f"is not used by rotary positions of type {kind}"
            raise section.refusal(f"{section.said(name)} {what}")


def left_out(config: TheirConfig, family: str) -> Iterator[str]:
    """Yield a phrase for each kind of key that is ignored. Raises ConfigError for unknown keys if
    the model brings code of its own, which may use them.
    """
    free = {**WITHOUT_EFFECT, **WITHOUT_EFFECT_IN.get(family, {})}
    known = {*NEUTRAL, *free, *NOT_APPLIED, AUTO_MAP}
    unknown = [name for name in config.unread() if name not in known]
    for section in map(config.section, config.asked_within):
        unread = [name for name in section.unread() if name not in QUANTISED_WITHOUT_EFFECT]
        if KV_CACHE in unread:
            unread.remove(KV_CACHE)
            yield f"{section.name(KV_CACHE)}, as keys and values are not quantised"
        unknown += map(section.name, unread)
    if config.values.get(AUTO_MAP):
        if unknown:
            raise _code_of_its_own(config, family, unknown)
        yield f"{AUTO_MAP}, as code that comes with a model is not run"
    if unknown:
        yield f"{_listed(unknown)}, which models of type {family} do not use"
    for name in NOT_APPLIED:
        if config.values.get(name):
            yield f"{config.said(name)}, as no such noise is applied in training"


def _code_of_its_own(config: TheirConfig, family: str, unknown: list[str]) -> ConfigError:
    what = (
        f"{_listed(unknown)} may mean something to the code that {AUTO_MAP} names, which is not run"
    )
    error = config.refusal(what)
    advice = f"take {AUTO_MAP} out of it to have the model computed as any other {family}"
    return ConfigError(error.key, error.value, error.rule, advice=advice)


def _listed(names: list[str]) -> str:
    return shortened(", ".join(names))
