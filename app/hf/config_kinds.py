"""What kinds of values the keys of a config.json have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

MOST = 2**63  # of a number; more, and infinities, are none
WHOLE = frozenset((
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "intermediate_size", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "decoder_sparse_step", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "n_group", "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "num_nextn_predict_layers",
))  # fmt: skip
NUMBER = frozenset((
    "rms_norm_eps", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "low_freq_factor", "high_freq_factor", "router_aux_loss_coef", "routed_scaling_factor",
    "aux_loss_alpha",
))  # fmt: skip
FLAG = frozenset(("tie_word_embeddings", "norm_topk_prob"))
SECTION = frozenset(("rope_parameters", "rope_scaling", "quantization_config"))
TEXTS = frozenset(("layer_types",))
WHOLES = frozenset(("mlp_only_layers", "weight_block_size"))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST


KINDS: tuple[tuple[frozenset[str], str, Callable[[Any], bool]], ...] = (
    (WHOLE, "no whole number", _is_whole),
    (NUMBER, "no number", _is_number),
    (FLAG, "neither true nor false", lambda value: isinstance(value, bool)),
    (SECTION, "no section", lambda value: isinstance(value, dict)),
    (TEXTS, "no list of words", lambda value: _all(value, lambda each: isinstance(each, str))),
    (WHOLES, "no list of whole numbers", lambda value: _all(value, _is_whole)),
)


def _all(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys whose values are not what they should be, and what these are not; null always fits."""
    for names, told, fits in KINDS:
        for name in sorted(names & values.keys()):
            if values[name] is not None and not fits(values[name]):
                yield name, told
