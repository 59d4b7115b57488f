"""config.json of a Hugging Face model: typed access that records which keys were read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.errors import ConfigError
from app.hf.behind import COUNTS
from app.hf.file_names import CONFIG_JSON
from app.hf.wrapped import unwrapped

NOWHERE = Path(CONFIG_JSON)  # path of a config.json that exists in memory only
MOST_TOLD = 60  # most characters of a value in a message
MOST = 2**63  # numbers beyond it, infinities included, are refused
WHOLE = frozenset((
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "intermediate_size", "head_dim", "max_position_embeddings", "original_max_position_embeddings",
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "decoder_sparse_step", "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    "n_group", "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", *COUNTS, "sliding_window", "max_window_layers", "no_rope_layer_interval",
    "shared_expert_intermediate_size", "rotary_dim", "moe_k", "moe_num_experts",
    "moe_num_shared_experts", "moe_layer_start_index", "moe_layer_interval",
    "full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
))  # fmt: skip
NUMBER = frozenset((
    "rms_norm_eps", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
    "low_freq_factor", "high_freq_factor", "router_aux_loss_coef", "routed_scaling_factor",
    "aux_loss_alpha", "attention_factor", "query_pre_attn_scalar", "attn_logit_softcapping",
    "final_logit_softcapping", "rope_local_base_freq", "logit_scale", "layer_norm_eps",
    "swiglu_alpha", "swiglu_limit", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logits_scaling", "partial_rotary_factor", "moe_norm_min",
    "norm_epsilon", "norm_eps", "rotary_pct", "rotary_emb_base",
))  # fmt: skip
FLAG = frozenset(("tie_word_embeddings", "norm_topk_prob", "seq_aux", "use_sliding_window",
                  "truncate", "qkv_bias", "attention_bias", "attention_out_bias",
                  "mlp_bias", "use_qk_norm", "use_bias", "use_parallel_residual",
                  "moe_use_aux_free"))  # fmt: skip
SECTION = frozenset(("rope_parameters", "rope_scaling", "quantization_config"))
TEXTS = frozenset(("layer_types", "mlp_layer_types"))
NUMBERS = frozenset(("short_factor", "long_factor"))
WHOLES = frozenset(
    ("mlp_only_layers", "weight_block_size", "no_rope_layers", "block_structure", "attn_type_list")
)


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
    (NUMBERS, "no list of numbers", lambda value: _all(value, _is_number)),
)


def _all(value: object, fits: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def misfits(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield keys whose values have the wrong kind, with what is wrong; null always fits."""
    for names, told, fits in KINDS:
        for name in sorted(names & values.keys()):
            if values[name] is not None and not fits(values[name]):
                yield name, told


def shortened(text: str) -> str:
    """Shorten a value of config.json for a message."""
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]}…"


@dataclass(frozen=True, slots=True)
class TheirConfig:
    """Values of a config.json or of one of its sections; a required key that it lacks raises
    ConfigError.
    """

    values: Mapping[str, Any]
    path: Path
    key: str  # option that named the model, for messages
    inside: str = ""  # name of the section; empty at top level
    asked: set[str] = field(default_factory=set, compare=False, repr=False)  # keys that were read
    # section -> its keys that were read
    asked_within: dict[str, set[str]] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, told in misfits(self.values):
            raise self.refusal(f"{self.said(name)} is {told}")

    @classmethod
    def read(cls, folder: Path, key: str) -> TheirConfig:
        """Read config.json of a model's folder. Raises ConfigError if it is missing or broken."""
        path = folder / CONFIG_JSON
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(key, folder, f"has no {CONFIG_JSON}") from None
        except OSError as error:
            rule = f"{CONFIG_JSON} cannot be read: {error.strerror}"
            raise ConfigError(key, folder, rule) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(key, folder, f"{CONFIG_JSON} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(key, folder, f"{CONFIG_JSON} is no JSON object")
        return cls(unwrapped(values), path, key)

    def completed(self, defaults: Mapping[str, Any]) -> TheirConfig:
        """Fill in missing keys by defaults; null stays, except as the base of rotary positions."""
        said = {k: v for k, v in self.values.items() if v is not None or k != "rope_theta"}
        return replace(self, values={**defaults, **said})

    def section(self, name: str) -> TheirConfig:
        """Return a section; an empty one if it is missing or null."""
        asked = self.asked_within.setdefault(name, set())
        return TheirConfig(self.get(name, {}), self.path, self.key, inside=name, asked=asked)

    def name(self, name: str) -> str:
        """Return the name of a key for messages, with its section."""
        return f"{self.inside}.{name}" if self.inside else name

    def said(self, name: str) -> str:
        """Return key=value for messages."""
        return f"{self.name(name)}={shortened(json.dumps(self.values[name]))}"

    def unread(self) -> list[str]:
        """Return the keys with a value that has not been read."""
        said = (name for name, value in self.values.items() if value is not None)
        return [name for name in said if name not in self.asked]

    def value(self, name: str) -> Any:
        """Return a value; None if it is missing or null."""
        self.asked.add(name)
        return self.values.get(name)

    def refusal(self, what: str) -> ConfigError:
        """Return the error that says what is wrong with this config.json."""
        return ConfigError(self.key, self.path.parent, f"{CONFIG_JSON}: {what}")

    def need(self, name: str) -> Any:
        """Return a required value. Raises ConfigError if it is missing."""
        if (found := self.value(name)) is None:
            raise self.refusal(f"{self.name(name)} is missing")
        return found

    def either(self, *spellings: str) -> Any:
        """Return a required value with several possible names, equal under all that are there."""
        found = [name for name in spellings if self.value(name) is not None]
        for other in found[1:]:
            if self.values[other] != self.values[found[0]]:
                what = f"{self.said(found[0])} and {self.said(other)} must be equal"
                raise self.refusal(what)
        return self.need(found[0] if found else spellings[0])

    def get(self, name: str, default: Any) -> Any:
        """Return a value, or `default` if it is missing or null."""
        found = self.value(name)
        return default if found is None else found

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse any value but `allowed`; a missing key passes, and so does null unless True is
        among them.
        """
        found = self.value(name)
        needed = name in self.values and any(each is True for each in allowed)
        if (found is not None or needed) and found not in allowed:
            raise self.unsupported(name)

    def unsupported(self, name: str) -> ConfigError:
        """Return the error for a value that our models do not support."""
        return self.refusal(f"{self.said(name)} is not supported")

    def renamed(self, names: Mapping[str, str]) -> dict[str, Any]:
        """Return required values under our names."""
        return {ours: self.need(theirs) for ours, theirs in names.items()}
