"""Supported families of Hugging Face models: names, tensors and configurations.

A model is exported as the first family whose config.json, read back, gives the same model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from app.config import ModelConfig, MoEConfig
from app.errors import ConfigError, typed
from app.hf import (
    cohere2,
    ernie4_5,
    exaone4,
    gemma,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    minimax_m2,
    olmo,
    qwen_moe,
    seed_oss,
    tables,
)
from app.hf import config_json as config
from app.hf.tables import NameLine
from app.hf.their_config import NOWHERE, TheirConfig, shortened
from app.plan.model.stage import NamedWeight, model_weights
from app.programs import page


@dataclass(frozen=True, slots=True)
class Family:
    """Models that differ only in their sizes."""

    model_type: str  # in config.json
    architecture: str  # class in `transformers`
    read: Callable[[TheirConfig], dict[str, Any]]  # returns fields of our configuration
    lines: tuple[NameLine, ...]  # weights
    written_moe: Callable[[MoEConfig], dict[str, Any]] | None = None  # None for dense families
    layers: tuple[str, ...] = ()  # keys of what layers differ in, of `config_json.written_layers`
    # returns keys of config.json that other families lack, or spell otherwise
    more: Callable[[ModelConfig], Mapping[str, Any]] | None = None
    # type that models without variants are exported as, where an earlier family computes the same
    written_as: str | None = None
    # beginning of the names of tensors that predict further tokens, besides those of layers
    predicting: str | None = None
    # values of keys that config.json lacks: the defaults of the class in `transformers`
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def table(self, model: ModelConfig) -> Sequence[NameLine]:
        """Return the lines that this model uses."""
        if model.mla is not None and model.mla.q_lora_rank is None:
            return tables.without_query_latent(self.lines)
        return self.lines

    @property
    def predicts(self) -> bool:
        """True if its models may have multi-token prediction."""
        return tables.PREDICTS in self.lines

    def weights(self, model: ModelConfig) -> Iterator[NamedWeight]:
        """Yield the model's tensors that its files hold: weights and router biases."""
        yield from model_weights(model)
        yield from tables.router_biases(model)

    def written(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json of a model, as far as our configuration determines it."""
        found = config.written(model, self.model_type, self.architecture)
        if self.written_moe is not None and model.moe is not None:
            found |= self.written_moe(model.moe)
        layers = config.written_layers(model)
        found |= {key: layers[key] for key in self.layers}
        if self.predicts:
            found[tables.PREDICTED] = model.mtp.layers
        return found if self.more is None else {**found, **self.more(model)}


_GROUPED = (*tables.WHOLE_MODEL, *tables.EVERY_LAYER, *tables.GROUPED_ATTENTION)
_DEEPSEEK = (
    *tables.WHOLE_MODEL,
    *tables.EVERY_LAYER,
    *tables.LATENT_ATTENTION,
    *tables.EXPERTS,
    *tables.SHARED_EXPERTS,
)
_PREDICTING = (*_DEEPSEEK, *tables.PREDICTION)
_QWEN_LAYERS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}
_DEEPSEEK_V3_DEFAULTS = {
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    tables.PREDICTED: 1,
    "norm_topk_prob": True,
}
FAMILIES = (
    Family("llama", "LlamaForCausalLM", config.llama, _GROUPED),
    Family(
        "mistral",
        "MistralForCausalLM",
        config.mistral,
        _GROUPED,
        layers=("sliding_window",),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "ministral",
        "MinistralForCausalLM",
        config.ministral,
        _GROUPED,
        layers=("sliding_window", "layer_types"),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        config.smollm3,
        _GROUPED,
        layers=("use_sliding_window", "sliding_window", "layer_types", "no_rope_layers"),
        defaults={
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2e6,
            "no_rope_layer_interval": 4,
        },
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        config.qwen2,
        _GROUPED,
        layers=_QWEN_LAYERS,
        defaults={"num_key_value_heads": 32, **_QWEN_DEFAULTS},
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        config.qwen3,
        _GROUPED,
        layers=_QWEN_LAYERS,
        defaults={"num_key_value_heads": 32, "head_dim": 128, **_QWEN_DEFAULTS},
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        config.mixtral,
        (*_GROUPED, *tables.MIXTRAL_EXPERTS),
        config.written_mixtral,
        layers=("sliding_window",),
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "router_aux_loss_coef": 0.001},
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        olmo.olmoe,
        (*_GROUPED, *tables.EXPERTS),
        olmo.written_olmoe,
        defaults={"router_aux_loss_coef": 0.01},
    ),
    Family("olmo2", "Olmo2ForCausalLM", olmo.olmo2, olmo.LINES),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        olmo.olmo3,
        olmo.LINES,
        layers=("sliding_window", "layer_types"),
        more=olmo.written_olmo3,
        defaults={"sliding_window": 4096, "rope_theta": olmo.THETA},
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        gemma.gemma2,
        gemma.LINES,
        layers=("sliding_window", "layer_types"),
        more=gemma.written,
        defaults={
            **gemma.DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        gemma.gemma3,
        gemma.LINES,
        layers=("sliding_window", "layer_types"),
        more=gemma.written_gemma3,
        defaults={**gemma.DEFAULTS, "rope_theta": gemma.THETA},
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        exaone4.exaone4,
        exaone4.LINES,
        more=exaone4.written,
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        cohere2.cohere2,
        cohere2.LINES,
        layers=("sliding_window", "layer_types"),
        more=cohere2.written,
        defaults={
            "tie_word_embeddings": True,
            "sliding_window": 4096,
            "logit_scale": 0.0625,
        },
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        qwen_moe.qwen3_moe,
        (*_GROUPED, *tables.EXPERTS),
        qwen_moe.written_qwen3_moe,
        layers=("use_sliding_window", "sliding_window"),
        more=qwen_moe.written_sparse_layers,
        defaults={
            "num_key_value_heads": 4,
            "router_aux_loss_coef": 0.001,
            "sliding_window": 4096,
        },
    ),
    Family(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        qwen_moe.qwen2_moe,
        (*_GROUPED, *tables.EXPERTS, *tables.QWEN_SHARED_EXPERT),
        qwen_moe.written_qwen2_moe,
        layers=_QWEN_LAYERS,
        more=qwen_moe.written_qwen2,
        defaults=qwen_moe.DEFAULTS,
    ),
    Family(
        "seed_oss",
        "SeedOssForCausalLM",
        seed_oss.read,
        _GROUPED,
        more=seed_oss.written,
        written_as="qwen2",
        defaults=seed_oss.DEFAULTS,
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        config.deepseek_v2,
        _DEEPSEEK,
        config.written_deepseek,
        defaults={"q_lora_rank": 1536, "n_shared_experts": 2},
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        config.deepseek_v3,
        _PREDICTING,
        config.written_deepseek,
        defaults=_DEEPSEEK_V3_DEFAULTS,
    ),
    Family(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        glm4_moe_lite.read,
        _DEEPSEEK,
        config.written_deepseek,
        more=glm4_moe_lite.written,
        defaults=glm4_moe_lite.DEFAULTS,
    ),
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        glm4_moe.read,
        (*_GROUPED, *tables.EXPERTS, *tables.SHARED_EXPERTS, *tables.PREDICTION),
        config.written_deepseek,
        more=glm4_moe.written,
        defaults=glm4_moe.DEFAULTS,
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        minimax_m2.read,
        (*_GROUPED, *tables.MIXTRAL_EXPERTS, *tables.MINIMAX_BIAS),
        config.written_mixtral,
        more=minimax_m2.written,
        defaults=minimax_m2.DEFAULTS,
    ),
    Family(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        ernie4_5.dense,
        ernie4_5.DENSE_LINES,
        written_as="llama",
        defaults=ernie4_5.DENSE_DEFAULTS,
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        ernie4_5.with_experts,
        ernie4_5.LINES,
        ernie4_5.written_moe,
        more=ernie4_5.written,
        defaults=ernie4_5.DEFAULTS,
        predicting="model.mtp_",
    ),
    Family(
        "kimi_k2",  # of which `transformers` has no class
        "DeepseekV3ForCausalLM",
        config.deepseek_v3,
        _PREDICTING,
        written_as="deepseek_v3",
        defaults=_DEEPSEEK_V3_DEFAULTS,
    ),
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        gpt_oss.read,
        (*_GROUPED, *tables.GPT_OSS),
        gpt_oss.written_moe,
        layers=("sliding_window", "layer_types"),
        defaults=gpt_oss.DEFAULTS,
    ),
)


def family_named(found: TheirConfig) -> Family:
    """Return the family that a config.json names. Raises ConfigError for an unknown one."""
    kind = shortened(str(found.need("model_type")))
    for family in FAMILIES:
        if family.model_type == kind:
            return family
    raise found.refusal(
        f"models of type {kind} are not supported; {page('hugging-face-keys.md')} has a table of "
        "those that are"
    )


def family_of(model: ModelConfig, key: str, value: object) -> Family:
    """Return the family that a model is exported as. Raises ConfigError if there is none; `key` and
    `value` say where the model comes from.
    """
    closest: tuple[int, str] | None = None
    for family in FAMILIES:
        if (family.written_moe is None) != (model.moe is None):
            continue
        try:
            fields = family.read(TheirConfig(family.written(model), NOWHERE, key))
            again = config.as_model(fields, model.name)
            if family.predicts:
                again = dataclasses.replace(again, mtp=model.mtp)
        except ConfigError:
            continue  # the model lacks something that this family requires
        unlike = list(differences(model, again))
        if not unlike:
            return family
        if closest is None or len(unlike) < closest[0]:
            said = ", ".join(f"{field}={typed(mine)}" for field, mine, _ in unlike)
            closest = len(unlike), f"; {family.model_type}, the closest, has no {said}"
    rule = "no supported Hugging Face family computes the same as this model"
    raise ConfigError(key, value, rule + (closest[1] if closest else ""))


# Fields that change what a model computes: all but names, initial weights, and experts, of which
# those of training alone (losses, noise) may differ.
ARCHITECTURE = tuple(
    each.name
    for each in dataclasses.fields(ModelConfig)
    if each.name not in ("name", "init_std", "init_from", "moe")
)
OF_EXPERTS = ("num_experts", "top_k", "ffn_hidden_size", "every_n", "first_k_dense",
              "dense_layers",
              "shared_ffn_hidden_size", "shared_gate", "score", "pre_softmax", "groups",
              "topk_groups", "group_best", "routed_scale", "norm_topk_prob", "expert_bias",
              "logit_bias", "swiglu_limit", "swiglu_alpha")  # fmt: skip
Difference = tuple[str, Any, Any]  # dotted field, of one, of the other


def differences(one: ModelConfig, other: ModelConfig) -> Iterator[Difference]:
    """Yield the fields by which two models compute differently or have different weights."""
    yield from _unlike("", _essence(one), _essence(other))


def _unlike(prefix: str, one: dict[str, Any], other: dict[str, Any]) -> Iterator[Difference]:
    for name, mine in one.items():
        theirs = other.get(name)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _unlike(f"{prefix}{name}.", mine, theirs)
        elif mine != theirs:
            yield f"{prefix}{name}", *(_told(each) for each in (mine, theirs))


def _told(value: Any) -> Any:
    """Return a value for a message: {…} in place of a nested section."""
    return "{…}" if isinstance(value, dict) else value


def _essence(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that change what a model computes, in a canonical form."""
    found = {name: _plain(getattr(model, name)) for name in ARCHITECTURE}
    found["head_dim"] = None if model.mla else model.head_width
    found["mtp"] = {"layers": model.mtp.layers}
    found["rotary_dim"] = None if model.mla else model.rope.width
    found["layer_types"] = config.layer_types(model)
    found["no_rope_layers"] = config.rotated_layers(model)
    found["query_pre_attn_scalar"] = float(model.query_pre_attn_scalar or model.head_width)
    found["logit_scale"] = 1.0 if model.logit_scale is None else model.logit_scale
    if model.local_rope_theta is not None:
        ropes = {spec.attention.rope for spec in model.layer_specs}
        found["local_rope_theta"] = model.local_rope_theta if len(ropes - {None}) > 1 else None
    if all(map(model.is_moe_layer, range(model.num_layers))):
        del found["ffn_hidden_size"]  # unused if every layer is MoE
    if model.mla is not None:
        found["mla"]["norm_eps"] = model.latent_eps
    if model.moe is None:
        return found | {"moe": None}
    moe = {name: _plain(getattr(model.moe, name)) for name in OF_EXPERTS}
    moe["routed_scale"] = 1.0 if model.moe.routed_scale is None else model.moe.routed_scale
    moe["swiglu_alpha"] = model.moe.activation_alpha
    moe["norm_topk_prob"] = model.moe.normalizes_sigmoids
    if model.moe.dense_layers:  # first_k_dense alone might say the same
        layers = range(model.num_layers)
        dense = [layer for layer in layers if not model.is_moe_layer(layer)]
        leading = dense == list(range(len(dense)))
        moe |= {"every_n": 1, "first_k_dense": len(dense) if leading else 0}
        moe["dense_layers"] = () if leading else tuple(dense)
    if model.moe.groups and model.moe.topk_groups:
        moe["group_best"] = model.moe.group_best or model.moe.top_k // model.moe.topk_groups
    return found | {"moe": moe}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.value if isinstance(value, Enum) else value
