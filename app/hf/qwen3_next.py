"""Qwen3-Next and the text models of Qwen3.5: gated delta nets, and attention with a gate in every
fourth layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.choices import LayerType, NormKind
from app.config import LinearAttentionConfig, ModelConfig
from app.hf import config_json, qwen_moe, tables
from app.hf.behind import Behind
from app.hf.fits import Shape, whole
from app.hf.rotary import rotary_of_part, written_factor
from app.hf.tables import NameLine
from app.hf.their_config import TheirConfig
from app.hf.weight_part import WeightPart
from app.plan.sharding.reshard import Block

DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MOE_DEFAULTS = {**DEFAULTS, "num_key_value_heads": 2, "router_aux_loss_coef": 0.001}
NEXT_DEFAULTS = {**MOE_DEFAULTS, "norm_topk_prob": True}
INTERVAL = 4  # every such layer has attention, where config.json does not say which
BEHIND = Behind(block="mtp.")  # layers that predict further tokens, which are left out
LINEAR = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim",
    "value_head_dim": "linear_value_head_dim",
    "conv_width": "linear_conv_kernel_dim",
}


def dense(config: TheirConfig) -> dict[str, Any]:
    """Qwen3.5, dense."""
    return {**_fields(config), "ffn_hidden_size": config.need("intermediate_size"), "moe": None}


def qwen3_next(config: TheirConfig) -> dict[str, Any]:
    """Qwen3-Next: experts beside a shared one with a gate."""
    moe = {**qwen_moe.shared_experts(config), **qwen_moe.sparse_layers(config)}
    moe["pre_softmax"] = not config.get("norm_topk_prob", False)
    ffn = config.need("intermediate_size")
    return {**_fields(config), "ffn_hidden_size": ffn, "moe": moe}


def qwen3_5_moe(config: TheirConfig) -> dict[str, Any]:
    """Qwen3.5 with experts in every layer, whose weights always add up to one."""
    return {**_fields(config), "moe": qwen_moe.shared_experts(config)}


def _fields(config: TheirConfig) -> dict[str, Any]:
    positions = config.section("rope_parameters")
    for name in ("mrope_section", "mrope_interleaved"):
        positions.value(name)  # of images: the three positions of a text token are equal
    linear = config.renamed(LINEAR)
    fields = config_json.grouped(config, _layers, rotary_of_part)
    return {
        **fields,
        "qk_norm": True,
        "norm": NormKind.rms_plus_one,
        "attention_gate": True,
        "linear_attention": linear if LayerType.linear_attention in fields["layer_types"] else None,
    }


def _layers(config: TheirConfig, layers: int) -> dict[str, Any]:
    """Return the fields of the layers' types, by layer_types or full_attention_interval."""
    both = config_json.LINEAR, config_json.FULL
    interval = config.get("full_attention_interval", INTERVAL)
    types = config.value("layer_types")
    if types is None and not interval:
        raise config.unsupported("full_attention_interval")
    if types is None:
        types = [both[(layer + 1) % interval == 0] for layer in range(layers)]
    if set(types) - set(both) or len(types) != layers:
        rule = f"layer_types needs one of {' and '.join(both)} for each of {layers} layers"
        raise config.refusal(rule)
    return {"sliding_window": None, "layer_types": tuple(map(LayerType, types))}


def written(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of layers and of linear attention."""
    linear = model.linear_attention or LinearAttentionConfig()  # which no layer has then
    found = {theirs: getattr(linear, ours) for ours, theirs in LINEAR.items()}
    return {**found, "partial_rotary_factor": written_factor(model)}


def written_next(model: ModelConfig) -> Mapping[str, Any]:
    """Return the keys of Qwen3-Next that those of Qwen3.5 are without."""
    return {**written(model), **qwen_moe.written_sparse_layers(model)}


def channels(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map taps of all queries, then of all keys, then of all values."""
    (name,) = theirs
    count, taps = shape
    yield from _joined(model, name, (count, 1, taps), (count, taps))


def projections(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map projections to queries, keys and values as `channels`, and one to gates."""
    linear = model.linear_attention
    assert linear is not None
    joined, gates = theirs
    rows, hidden = shape
    yield from _joined(model, joined, (linear.channels, hidden), (rows, hidden))
    groups, values = linear.key_heads, linear.values_per_key * linear.value_head_dim
    apart = (groups, rows // groups, hidden)
    ours = Block(apart, (0, apart[1] - values, 0), apart)
    whole = Block.whole(groups, values, hidden)
    yield WeightPart(gates, (groups * values, hidden), ours, whole, (0, 1, 2))


def in_turn(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map projections to query, key and values, and to gates, of one key head after another."""
    linear = model.linear_attention
    assert linear is not None
    (name,) = theirs
    groups, rows = linear.key_heads, shape[0] // linear.key_heads
    apart, gates = (groups, rows, shape[1]), rows - linear.values_per_key * linear.value_head_dim
    for group in range(groups):
        for first, stop in ((0, gates), (gates, rows)):
            box = Block(apart, (group, first, 0), (group + 1, stop, shape[1]))
            yield WeightPart(name, shape, box, box, (0, 1, 2))


def _joined(
    model: ModelConfig, name: str, their_shape: Shape, shape: Shape
) -> Iterator[WeightPart]:
    """Map the queries, the keys and the values of all key heads, one after the other."""
    linear = model.linear_attention
    assert linear is not None
    groups, key = linear.key_heads, linear.key_head_dim
    apart = (groups, shape[0] // groups, 1, shape[1])
    whole, first, behind = (1, their_shape[0], 1, shape[1]), 0, 0
    for size in (key, key, linear.values_per_key * linear.value_head_dim):
        for group in range(groups):
            ours = Block(apart, (group, first, 0, 0), (group + 1, first + size, *apart[2:]))
            low = behind + group * size
            block = Block(whole, (0, low, 0, 0), (1, low + size, *whole[2:]))
            yield WeightPart(name, their_shape, ours, block, (0, 1, 2, 3))
        first, behind = first + size, behind + groups * size


def both_of_beta(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map projections to what is written and to what is forgotten, in two tensors."""
    linear = model.linear_attention
    assert linear is not None
    groups, values, hidden = linear.key_heads, linear.values_per_key, shape[1]
    apart = (groups, 2, values, hidden)
    for half, name in enumerate(theirs):
        ours = Block(apart, (0, half, 0, 0), (groups, half + 1, *apart[2:]))
        whole = Block.whole(groups, 1, values, hidden)
        yield WeightPart(name, (groups * values, hidden), ours, whole, (0, 1, 2, 3))


def _module(name: str) -> str:
    return f"linear_attn.{name}"


_ATTENTION = (
    *tables.GROUPED_ATTENTION,
    NameLine("attn.a_log", (_module("A_log"),), whole),
    NameLine("attn.dt_bias", (_module("dt_bias"),), whole),
    NameLine("attn.conv", (_module("conv1d.weight"),), channels),
    NameLine("attn.norm.weight", (_module("norm.weight"),), whole),
    NameLine("attn.w_out", (_module("out_proj.weight"),), whole),
)
NEXT = (
    *_ATTENTION,
    NameLine("attn.w_in", (_module("in_proj_qkvz.weight"),), in_turn),
    NameLine("attn.w_beta", (_module("in_proj_ba.weight"),), whole),
)
APART = (
    *_ATTENTION,
    NameLine(
        "attn.w_in", tuple(_module(f"in_proj_{name}.weight") for name in ("qkv", "z")), projections
    ),
    NameLine(
        "attn.w_beta", tuple(_module(f"in_proj_{name}.weight") for name in "ba"), both_of_beta
    ),
)
