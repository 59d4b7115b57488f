"""The family of a Hugging Face model, and that which one of our models is exported as.

A model is exported as the first family whose config.json, read back, gives the same model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

from app.config import ModelConfig
from app.config.model import LOSS_WEIGHTS
from app.errors import ConfigError, typed
from app.hf import config_json as config
from app.hf.family import Family
from app.hf.supported import FAMILIES
from app.hf.tables import NameLine, layer_of
from app.hf.their_config import NOWHERE, TheirConfig, shortened
from app.programs import page


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
            if family.behind.lines:
                again = again.with_behind(model)
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


def same_files(one: Family, other: Family, model: ModelConfig) -> bool:
    """Return whether two families have the same tensors for a model, under the same names."""
    return one is other or _lines(one, model) == _lines(other, model)


def _lines(family: Family, model: ModelConfig) -> tuple[str, set[NameLine]]:
    first: dict[str, NameLine] = {}  # the spelling that is written
    for line in family.table(model):
        first.setdefault(line.ours, line)
    ours = {layer_of(named.name)[1] for named in family.weights(model)}
    return family.layers_name, {first[name] for name in ours}


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
    found["rotary_dim"] = None if model.mla else model.rope.width
    found["layer_types"] = config.layer_types(model)
    found["no_rope_layers"] = config.rotated_layers(model)
    found["query_pre_attn_scalar"] = float(model.query_pre_attn_scalar or model.head_width)
    found["logit_scale"] = 1.0 if model.logit_scale is None else model.logit_scale
    found["embedding_scale"] = model.embedding_factor
    found["residual_scale"] = model.residual_factor
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
        found = dataclasses.asdict(value)
        return {name: each for name, each in found.items() if name not in LOSS_WEIGHTS}
    return value.value if isinstance(value, Enum) else value
