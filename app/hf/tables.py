"""Tables of Hugging Face tensor names and our weights.

A table has a line for each of our weights, used for both import and export. Families share lines; a
family with other names has lines of its own. Several lines for one weight are alternative
spellings: all are read, the first is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.config import ModelConfig
from app.hf.fits import (
    Fit,
    alternating,
    expert_down,
    expert_gate_up,
    gate_up,
    gate_up_together,
    heads,
    heads_of_pairs,
    heads_together,
    row,
    stacked_down,
    stacked_gate_up,
    whole,
)
from app.hf.weight_part import WeightPart
from app.plan.model.stage import NamedWeight
from app.plan.model.weight import Weight

BIAS = "body.router.bias_E"  # router bias: a buffer, but saved like a weight
EMBEDDING = "model.embed_tokens.weight"
ADAPTED = "base_model.model."  # before names of modules in the files of `peft`
LAYERS, LAYERS_OF_NEOX = "model.layers", "gpt_neox.layers"
HEAD = "lm_head.weight"  # with tied embeddings some files contain a copy


@dataclass(frozen=True, slots=True)
class NameLine:
    """One of our weights, their tensors that hold it, and the function that maps them."""

    ours: str  # our name, without the layer's prefix
    theirs: tuple[str, ...]
    fit: Fit


def mlp_lines(ours: str, theirs: str) -> tuple[NameLine, ...]:
    """Return the lines of a feed-forward, weights and biases."""
    gate, up, down = (f"{theirs}.{name}_proj" for name in ("gate", "up", "down"))
    return (
        NameLine(f"{ours}.b_up", (f"{gate}.bias", f"{up}.bias"), gate_up),
        NameLine(f"{ours}.b_down", (f"{down}.bias",), whole),
        NameLine(f"{ours}.w_up", (f"{gate}.weight", f"{up}.weight"), gate_up),
        NameLine(f"{ours}.w_down", (f"{down}.weight",), whole),
    )


def _linears(*names: tuple[str, str]) -> tuple[NameLine, ...]:
    """Return the lines of linear layers, (our weight, their module), and of their biases."""
    return tuple(
        line
        for ours, theirs in names
        for line in (
            NameLine(ours, (f"{theirs}.weight",), whole),
            NameLine(ours.replace(".w", ".b"), (f"{theirs}.bias",), whole),
        )
    )


WHOLE_MODEL = (
    NameLine("embedding", (EMBEDDING,), whole),
    NameLine("norm.weight", ("model.norm.weight",), whole),
    NameLine("head", (HEAD,), whole),
)
GROUPED_ATTENTION = (
    NameLine("attn.bqkv", tuple(f"self_attn.{name}_proj.bias" for name in "qkv"), heads),
    NameLine("attn.wqkv", tuple(f"self_attn.{name}_proj.weight" for name in "qkv"), heads),
    NameLine("attn.q_norm.weight", ("self_attn.q_norm.weight",), whole),
    NameLine("attn.k_norm.weight", ("self_attn.k_norm.weight",), whole),
)
LATENT_ATTENTION = (
    NameLine("attn.q_a", ("self_attn.q_a_proj.weight",), whole),
    NameLine("attn.q_a_norm.weight", ("self_attn.q_a_layernorm.weight",), whole),
    NameLine("attn.q_b", ("self_attn.q_b_proj.weight",), whole),
    NameLine("attn.kv_a", ("self_attn.kv_a_proj_with_mqa.weight",), whole),
    NameLine("attn.kv_a_norm.weight", ("self_attn.kv_a_layernorm.weight",), whole),
    NameLine("attn.kv_b", ("self_attn.kv_b_proj.weight",), whole),
)
QUERIES_OF_HIDDEN = NameLine("attn.q_b", ("self_attn.q_proj.weight",), whole)  # without a latent
OUTPUTS = (  # of attention and dense feed-forwards, with the projections before them
    NameLine("attn.bo", ("self_attn.o_proj.bias",), whole),
    NameLine("attn.wo", ("self_attn.o_proj.weight",), whole),
    *mlp_lines("body.mlp", "mlp"),
)
EVERY_LAYER = (
    *OUTPUTS,
    NameLine("attn_norm.weight", ("input_layernorm.weight",), whole),
    NameLine("body.norm.weight", ("post_attention_layernorm.weight",), whole),
)
NORM_BEFORE_ATTENTION = NameLine("attn_norm.weight", ("input_layernorm.weight",), whole)
NORMS_AROUND = (
    NORM_BEFORE_ATTENTION,
    NameLine("attn_out_norm.weight", ("post_attention_layernorm.weight",), whole),
    NameLine("body.norm.weight", ("pre_feedforward_layernorm.weight",), whole),
    NameLine("body.out_norm.weight", ("post_feedforward_layernorm.weight",), whole),
)
NEIGHBOURING_PAIRS = tuple(  # of rotary positions, in their queries and keys
    NameLine(ours, tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv"), heads_of_pairs)
    for ours, kind in (("attn.bqkv", "bias"), ("attn.wqkv", "weight"))
)
PHI3 = (
    NameLine("attn.wqkv", ("self_attn.qkv_proj.weight",), heads_together),
    NameLine("attn.wo", ("self_attn.o_proj.weight",), whole),
    NameLine("body.mlp.w_up", ("mlp.gate_up_proj.weight",), gate_up_together),
    NameLine("body.mlp.w_down", ("mlp.down_proj.weight",), whole),
    NORM_BEFORE_ATTENTION,
    NameLine("body.norm.weight", ("post_attention_layernorm.weight",), whole),
)
NORMS_WITH_BIASES = tuple(
    NameLine(f"{ours}.{kind}", (f"{theirs}.{kind}",), whole)
    for ours, theirs in (
        ("attn_norm", "input_layernorm"),
        ("body.norm", "post_attention_layernorm"),
    )
    for kind in ("weight", "bias")
)
FINAL_BIAS = NameLine("norm.bias", ("model.norm.bias",), whole)
STARCODER2 = _linears(
    ("attn.wo", "self_attn.o_proj"),
    ("body.mlp.w_up", "mlp.c_fc"),
    ("body.mlp.w_down", "mlp.c_proj"),
)
NEMOTRON = _linears(
    ("attn.wo", "self_attn.o_proj"),
    ("body.mlp.w_up", "mlp.up_proj"),
    ("body.mlp.w_down", "mlp.down_proj"),
)
GPT_NEOX = (
    NameLine("embedding", ("gpt_neox.embed_in.weight",), whole),
    NameLine("head", ("embed_out.weight",), whole),  # as published, then as version 5 saves it
    NameLine("head", (HEAD,), whole),
    NameLine("norm.weight", ("gpt_neox.final_layer_norm.weight",), whole),
    NameLine("norm.bias", ("gpt_neox.final_layer_norm.bias",), whole),
    # by head: its query, its key, its value, as ours
    *_linears(
        ("attn.wqkv", "attention.query_key_value"),
        ("attn.wo", "attention.dense"),
        ("body.mlp.w_up", "mlp.dense_h_to_4h"),
        ("body.mlp.w_down", "mlp.dense_4h_to_h"),
    ),
    *NORMS_WITH_BIASES,
)
NORMS_BEHIND = (
    NameLine("attn_out_norm.weight", ("post_attention_layernorm.weight",), whole),
    NameLine("body.out_norm.weight", ("post_feedforward_layernorm.weight",), whole),
)
STACKED_EXPERTS = (
    NameLine("body.experts.w_up", ("mlp.experts.gate_up_proj",), stacked_gate_up),
    NameLine("body.experts.w_down", ("mlp.experts.down_proj",), stacked_down),
)
EXPERTS = (
    NameLine("body.router.weight", ("mlp.gate.weight",), whole),
    NameLine(
        "body.experts.w_up",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        expert_gate_up,
    ),
    NameLine("body.experts.w_down", ("mlp.experts.{expert}.down_proj.weight",), expert_down),
    *STACKED_EXPERTS,
)
SHARED_EXPERTS = (
    *mlp_lines("body.shared", "mlp.shared_experts"),
    NameLine(BIAS, ("mlp.gate.e_score_correction_bias",), whole),
)
MIXTRAL_EXPERTS = (
    NameLine("body.router.weight", ("block_sparse_moe.gate.weight",), whole),
    NameLine("body.router.weight", ("mlp.gate.weight",), whole),
    NameLine(
        "body.experts.w_up",
        (
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        expert_gate_up,
    ),
    NameLine("body.experts.w_down", ("block_sparse_moe.experts.{expert}.w2.weight",), expert_down),
    *STACKED_EXPERTS,
)
GRANITE_EXPERTS = (  # as published, then as version 5 of `transformers` names them
    NameLine("body.router.weight", ("block_sparse_moe.router.layer.weight",), whole),
    NameLine("body.router.weight", ("block_sparse_moe.router.weight",), whole),
    NameLine("body.experts.w_up", ("block_sparse_moe.input_linear.weight",), stacked_gate_up),
    NameLine("body.experts.w_up", ("block_sparse_moe.experts.gate_up_proj",), stacked_gate_up),
    NameLine("body.experts.w_down", ("block_sparse_moe.output_linear.weight",), stacked_down),
    NameLine("body.experts.w_down", ("block_sparse_moe.experts.down_proj",), stacked_down),
)
MINIMAX_BIAS = (
    NameLine(BIAS, ("block_sparse_moe.e_score_correction_bias",), whole),
    NameLine(BIAS, ("mlp.e_score_correction_bias",), whole),
)
ERNIE_EXPERTS = (
    *EXPERTS,
    *mlp_lines("body.shared", "mlp.shared_experts"),
    NameLine(BIAS, ("mlp.moe_statics.e_score_correction_bias",), row),
    NameLine(BIAS, ("mlp.gate.moe_statics.e_score_correction_bias",), row),
)
GPT_OSS = (
    NameLine("attn.sinks", ("self_attn.sinks",), whole),
    NameLine("body.router.weight", ("mlp.router.weight",), whole),
    NameLine("body.router.bias", ("mlp.router.bias",), whole),
    NameLine("body.experts.w_up", ("mlp.experts.gate_up_proj",), alternating),
    NameLine("body.experts.b_up", ("mlp.experts.gate_up_proj_bias",), alternating),
    NameLine("body.experts.w_down", ("mlp.experts.down_proj",), whole),
    NameLine("body.experts.b_down", ("mlp.experts.down_proj_bias",), whole),
)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One of our weights and its spellings in files; the first is the one that is written."""

    weight: NamedWeight
    spellings: tuple[tuple[WeightPart, ...], ...]


def router_bias(model: ModelConfig, router: str) -> Iterator[NamedWeight]:
    """Yield the bias of a router, if it has one: a buffer that is saved and read like a weight."""
    if model.moe is not None and model.moe.selects_by_bias:
        yield NamedWeight(f"{router}.bias_E", Weight((model.moe.num_experts,)))


def router_biases(model: ModelConfig) -> Iterator[NamedWeight]:
    """Yield the biases of all routers."""
    for layer in filter(model.is_moe_layer, model.all_layers):
        yield from router_bias(model, f"layers.{layer}.body.router")


def without_query_latent(lines: Sequence[NameLine]) -> Sequence[NameLine]:
    """Return a table of latent attention for models whose queries are not compressed."""
    kept = (line for line in lines if not line.ours.startswith("attn.q_"))
    return (*kept, QUERIES_OF_HIDDEN)


def mapping(
    lines: Sequence[NameLine], model: ModelConfig, weight: NamedWeight, layers: str = LAYERS
) -> Mapping:
    """Return the mapping of one of the model's weights; `layers`: the name of layers in files.
    Raises KeyError without a line for it.
    """
    layer, name = layer_of(weight.name)
    found = [line for line in lines if line.ours == name]
    if not found:
        raise KeyError(weight.name)
    prefix = "" if layer is None else f"{layers}.{layer}."
    shape = weight.weight.shape
    spellings = (
        line.fit(model, shape, [prefix + theirs for theirs in line.theirs]) for line in found
    )
    return Mapping(weight, tuple(map(tuple, spellings)))


def embedding_and_heads(lines: Sequence[NameLine]) -> tuple[str, tuple[str, ...]]:
    """Return the embedding's name in files, and those that the head may have."""
    named: dict[str, list[str]] = {"embedding": [], "head": []}
    for line in lines:
        named.get(line.ours, []).extend(line.theirs)
    return named["embedding"][0], tuple(named["head"])


def adapter_tensor(layer: int | None, theirs: str, letter: str, layers: str = LAYERS) -> str:
    """Return the name in `peft` of a matrix, A or B, of the adapter of one of a layer's tensors."""
    module = theirs.removesuffix(".weight")
    return f"{ADAPTED}{layers}.{layer}.{module}.lora_{letter}.weight"


def layer_of(name: str) -> tuple[int | None, str]:
    """Return the layer of a weight (None outside layers) and its name without the layer."""
    if not name.startswith("layers."):
        return None, name
    _, layer, rest = name.split(".", 2)
    return int(layer), rest


QWEN_SHARED_EXPERT = (
    *mlp_lines("body.shared", "mlp.shared_expert"),
    NameLine("body.shared_gate", ("mlp.shared_expert_gate.weight",), whole),
)
