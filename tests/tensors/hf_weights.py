"""Weights of Hugging Face models by our names, for tests."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from app.choices import BlockKind
from app.config import ModelConfig
from app.model.chunk import Chunk
from app.model.layers.linear import named_parameters
from app.moe.phases import Router
from app.plan.sharding.reshard import Block
from tests.tensors.hf_linear import linear_attention

NEIGHBOURS = 1234.0  # base of rotary positions of test models whose neighbouring values rotate


STATICS = "moe_statics.e_score_correction_bias"


def spread_weights(model: nn.Module) -> None:
    """Random weights that make every one of them count: matrices keep the scale of what they
    multiply, norms are not 1.
    """
    random = torch.Generator().manual_seed(3)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=random)
        param.data.copy_(
            noise / math.sqrt(param.shape[-1]) * 1.5 if param.dim() > 1 else 1 + 0.3 * noise
        )
    for name, param in model.named_parameters():
        if name.endswith("A_log"):  # states that last, so that no output is near zero
            param.data.sub_(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=random) * 0.2)


def fused_qkv(hf: dict[str, Tensor], prefix: str, kv_heads: int, kind: str = "weight") -> Tensor:
    """Per key/value head: its queries, its key, its value."""
    q, k, v = (hf[f"{prefix}.{name}_proj.{kind}"].unflatten(0, (kv_heads, -1)) for name in "qkv")
    return torch.cat((q, k, v), dim=1).flatten(0, 1)


def halves(hf: dict[str, Tensor], prefix: str, width: int) -> dict[str, Tensor]:
    """Queries and keys of heads whose neighbouring values rotate, as heads whose halves do."""
    names = (f"{prefix}.{name}_proj.{kind}" for name in "qk" for kind in ("weight", "bias"))
    return {name: torch.cat([hf[name].unflatten(0, (-1, width))[:, first::2] for first in (0, 1)],
                            dim=1).flatten(0, 1) for name in names if name in hf}  # fmt: skip


def latents(hf: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    """Return the modules that make queries, keys and values with multi-head latent attention."""
    names = {
        "q_a": "q_a_proj",
        "q_a_norm.weight": "q_a_layernorm",
        "q_b": "q_b_proj" if f"{theirs}.q_b_proj.weight" in hf else "q_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_a_norm.weight": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
    }
    found = {own: f"{theirs}.{name}.weight" for own, name in names.items()}
    return {f"{ours}.{own}": hf[name] for own, name in found.items() if name in hf}


def dense_mlp(hf: dict[str, Tensor], ours: str, theirs: str) -> dict[str, Tensor]:
    """The weights of a dense feed-forward part or of a shared expert; none where there is none."""
    found = {}
    for letter, kind in (("w", "weight"), ("b", "bias")):
        if f"{theirs}.up_proj.{kind}" in hf and f"{theirs}.gate_proj.{kind}" not in hf:
            up, down = (hf[f"{theirs}.{name}_proj.{kind}"] for name in ("up", "down"))
            found |= {f"{ours}.{letter}_up": up, f"{ours}.{letter}_down": down}
        if f"{theirs}.gate_proj.{kind}" in hf:
            gate, up, down = (hf[f"{theirs}.{name}_proj.{kind}"] for name in ("gate", "up", "down"))
            found |= {f"{ours}.{letter}_up": torch.cat((gate, up)), f"{ours}.{letter}_down": down}
    return found


def gpt_oss_experts(hf: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights of `body`, where gate and up alternate in the last dimension."""
    experts = f"{prefix}.experts"

    def halves(x: Tensor) -> Tensor:
        return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)

    return {
        "router.weight": hf[f"{prefix}.router.weight"],
        "router.bias": hf[f"{prefix}.router.bias"],
        "experts.w_up": halves(hf[f"{experts}.gate_up_proj"]),
        "experts.b_up": halves(hf[f"{experts}.gate_up_proj_bias"]),
        "experts.w_down": hf[f"{experts}.down_proj"],
        "experts.b_down": hf[f"{experts}.down_proj_bias"],
    }


def feed_forward(hf: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights of `body` besides its norm."""
    plain = {
        "router.weight": "gate.weight",
        "router.bias_E": "gate.e_score_correction_bias",
        "shared_gate": "shared_expert_gate.weight",
        "experts.w_up": "experts.gate_up_proj",
        "experts.w_down": "experts.down_proj",
    }
    weights = {
        ours: hf[f"{prefix}.{theirs}"]
        for ours, theirs in plain.items()
        if f"{prefix}.{theirs}" in hf
    }
    if f"{prefix}.e_score_correction_bias" in hf:
        weights["router.bias_E"] = hf[f"{prefix}.e_score_correction_bias"]
    if f"{prefix}.gate.{STATICS}" in hf:
        weights["router.bias_E"] = hf[f"{prefix}.gate.{STATICS}"][0]
    if f"{prefix}.router.weight" in hf:
        return gpt_oss_experts(hf, prefix)
    weights = {
        name: value.transpose(1, 2) if name.startswith("experts") else value
        for name, value in weights.items()
    }
    for ours, theirs in (
        ("mlp", prefix),
        ("shared", f"{prefix}.shared_expert"),
        ("shared", f"{prefix}.shared_experts"),
    ):
        weights |= dense_mlp(hf, ours, theirs)
    return weights


OTHER_NAMES = {
    "gpt_neox.embed_in": "model.embed_tokens",
    "gpt_neox.final_layer_norm": "model.norm",
    "gpt_neox.layers": "model.layers",
    "embed_out": "lm_head",
    "attention.query_key_value": "self_attn.of_heads",
    "attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}


def as_llama(name: str) -> str:
    """The name that Llama, or its like without gates, has for a tensor of another family."""
    for other, usual in OTHER_NAMES.items():
        name = name.replace(other, usual)
    return name


def halved(hf: dict[str, Tensor], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Tensors of Phi-3 as Llama has them: of queries, keys and values, of gate and up."""
    widths = [heads * model.head_width for heads in (model.num_heads, *[model.num_kv_heads] * 2)]
    for name, value in hf.items():
        match name.split(".")[-2:]:
            case ["qkv_proj", _]:
                for letter, part in zip("qkv", value.split(widths), strict=True):
                    yield name.replace("qkv", letter), part
            case ["of_heads", _]:  # by head: its query, its key, its value
                parts = value.unflatten(0, (model.num_heads, 3, -1)).unbind(1)
                for letter, part in zip("qkv", parts, strict=True):
                    yield name.replace("of_heads", f"{letter}_proj"), part.flatten(0, 1)
            case ["gate_up_proj", _]:
                for half, part in zip(("gate", "up"), value.chunk(2), strict=True):
                    yield name.replace("gate_up", half), part
            case _:
                yield name, value


# of a layer, by the model's block
NORMS = {
    BlockKind.norm_before: {"attn_norm": "input", "body.norm": "post_attention"},
    BlockKind.norm_around: {
        "attn_norm": "input",
        "attn_out_norm": "post_attention",
        "body.norm": "pre_feedforward",
        "body.out_norm": "post_feedforward",
    },
    BlockKind.parallel: {"attn_norm": "input"},
    BlockKind.parallel_norms: {"attn_norm": "input", "body.norm": "post_attention"},
    BlockKind.norm_after: {"attn_out_norm": "post_attention", "body.out_norm": "post_feedforward"},
}


def norms(hf: dict[str, Tensor], ours: str, theirs: str, block: BlockKind) -> dict[str, Tensor]:
    """The norms of a layer; those of heads are none of them."""
    names = {
        f"{ours}.{own}.{leaf}": f"{theirs}.{name}_layernorm.{leaf}"
        for own, name in NORMS[block].items()
        for leaf in ("weight", "bias")
    }
    return {own: hf[name] for own, name in names.items() if name in hf}


def softmax_attention(
    hf: dict[str, Tensor], ours: str, theirs: str, model: ModelConfig
) -> dict[str, Tensor]:
    """The weights of a layer's attention."""
    weights = {f"{ours}.attn.wo": hf[f"{theirs}.self_attn.o_proj.weight"]}
    for norm in ("q_norm", "k_norm") if model.qk_norm else ():
        weights[f"{ours}.attn.{norm}.weight"] = hf[f"{theirs}.self_attn.{norm}.weight"]
    if model.mla is not None:
        return weights | latents(hf, f"{ours}.attn", f"{theirs}.self_attn")
    of_heads = f"{theirs}.self_attn", model.num_kv_heads
    if model.block is BlockKind.parallel or model.rope_theta == NEIGHBOURS:
        hf = hf | halves(hf, f"{theirs}.self_attn", model.head_width)
    weights[f"{ours}.attn.wqkv"] = fused_qkv(hf, *of_heads)
    if model.qkv_bias:
        weights[f"{ours}.attn.bqkv"] = fused_qkv(hf, *of_heads, kind="bias")
    if model.attn_out_bias:
        weights[f"{ours}.attn.bo"] = hf[f"{theirs}.self_attn.o_proj.bias"]
    if model.sinks:
        weights[f"{ours}.attn.sinks"] = hf[f"{theirs}.self_attn.sinks"]
    return weights


def converted(hf: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Our parameter names -> Hugging Face weights."""
    hf = dict(halved({as_llama(name): each for name, each in hf.items()}, model))
    hf = {
        name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp"): each
        for name, each in hf.items()
    }
    weights = {"embedding": hf["model.embed_tokens.weight"], "norm.weight": hf["model.norm.weight"]}
    weights |= {name[6:]: value for name, value in hf.items() if name == "model.norm.bias"}
    if not model.tie_embeddings:
        weights["head"] = hf["lm_head.weight"]
    for index in range(model.num_layers):
        ours, theirs = f"layers.{index}", f"model.layers.{index}"
        weights |= norms(hf, ours, theirs, model.block)
        weights |= {
            f"{ours}.body.{name}": value
            for name, value in feed_forward(hf, f"{theirs}.mlp").items()
        }
        linear = model.layer_specs[index].attention.linear
        if linear is not None:
            weights |= linear_attention(hf, f"{ours}.attn", f"{theirs}.linear_attn", linear)
            continue
        weights |= softmax_attention(hf, ours, theirs, model)
    return weights


@torch.no_grad()
def copy_weights(weights: dict[str, Tensor], chunk: Chunk) -> None:
    """Fill every parameter of the chunk, and the buffers that are given; a missing, superfluous
    or misshapen one fails.
    """
    own = dict(named_parameters(chunk)) | {
        name: buffer for name, buffer in chunk.named_buffers() if name in weights
    }
    assert own.keys() == weights.keys()
    for name, param in own.items():
        assert param.shape == weights[name].shape, name
        param.copy_(weights[name])


class Held:
    """The weights and routers' biases of a whole model."""

    def __init__(self, chunk: Chunk) -> None:
        self.values = {named.name: param for named, param in chunk.weights()}
        self.biases = {
            f"{name}.bias_E": module.bias_E
            for name, module in chunk.named_modules()
            if isinstance(module, Router)
        }

    def read(self, name: str, box: Block) -> Tensor:
        """A box of a weight, whose dimensions may be taken apart."""
        whole = (self.values | self.biases)[name].detach().view(box.shape)
        return whole[tuple(map(slice, box.start, box.stop))]
