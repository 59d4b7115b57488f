"""How the tensors of a Hugging Face model are called, and which of our weights hold the same.

A table has a line for each of our weights, read in both directions. Lines that several families
share are written once; what a family calls otherwise is a line of its own. Where a weight has
several lines, they are spellings of the same: the first is written, all are read.

`transformers` 4 wrote a tensor per expert, and so does version 5, which holds all experts of a
layer in one tensor of three dimensions; it writes those too when told to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.choices import Score
from app.config import ModelConfig
from app.hf.piece import Piece
from app.plan.model.stage import NamedWeight
from app.plan.model.weight import Weight
from app.plan.sharding.reshard import Block

Shape = tuple[int, ...]
# The pieces of a weight of this shape, of these tensors.
Fit = Callable[[ModelConfig, Shape, Sequence[str]], Iterator[Piece]]
BIAS = "body.router.bias_E"  # of routers: no weight, but kept and written as one
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # of which some files have a copy where it is the embedding


@dataclass(frozen=True, slots=True)
class NameLine:
    """One of our weights, the tensors of theirs that hold it, and how."""

    ours: str  # name; of a layer's weight without the layer
    theirs: tuple[str, ...]
    fit: Fit


def _whole(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    (name,) = theirs
    yield Piece.same(name, shape)


def _heads(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    """Queries, keys, values: of each key/value head we have its queries, its key, its value."""
    groups, width, columns = model.num_kv_heads, model.head_width, shape[1:]
    queries = model.num_heads // groups
    apart = (groups, queries + 2, width, *columns)
    first = 0
    for name, heads in zip(theirs, (queries, 1, 1), strict=True):
        start = (0, first, *(0 for _ in apart[2:]))
        stop = (groups, first + heads, width, *columns)
        their_whole = Block.whole(groups, heads, width, *columns)
        order = tuple(range(len(apart)))
        rows = groups * heads * width
        yield Piece(name, (rows, *columns), Block(apart, start, stop), their_whole, order)
        first += heads


def _gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    _, ffn, hidden = shape
    for number, name in enumerate(theirs):
        ours = Block(shape, (number, 0, 0), (number + 1, ffn, hidden))
        yield Piece(name, (ffn, hidden), ours, Block.whole(1, ffn, hidden), (0, 1, 2))


def _expert_gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    experts, hidden, _, ffn = shape
    for expert in range(experts):
        for number, name in enumerate(theirs):
            ours = Block(shape, (expert, 0, number, 0), (expert + 1, hidden, number + 1, ffn))
            whole = Block.whole(1, 1, ffn, hidden)
            yield Piece(name.format(expert=expert), (ffn, hidden), ours, whole, (0, 3, 1, 2))


def _expert_down(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    experts, ffn, hidden = shape
    (name,) = theirs
    for expert in range(experts):
        ours = Block(shape, (expert, 0, 0), (expert + 1, ffn, hidden))
        whole = Block.whole(1, hidden, ffn)
        yield Piece(name.format(expert=expert), (hidden, ffn), ours, whole, (0, 2, 1))


def _stacked_gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    experts, hidden, _, ffn = shape
    (name,) = theirs
    apart = (experts, 2, ffn, hidden)
    for number in range(2):
        ours = Block(shape, (0, 0, number, 0), (experts, hidden, number + 1, ffn))
        half = Block(apart, (0, number, 0, 0), (experts, number + 1, ffn, hidden))
        for expert in range(experts):  # of each expert the half is one range of rows
            yield Piece(
                name,
                (experts, 2 * ffn, hidden),
                ours.cut(0, experts, expert),
                half.cut(0, experts, expert),
                (0, 3, 1, 2),
            )


def _stacked_down(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[Piece]:
    experts, ffn, hidden = shape
    (name,) = theirs
    ours, whole = Block.whole(*shape), Block.whole(experts, hidden, ffn)
    for expert in range(experts):
        yield Piece(
            name,
            (experts, hidden, ffn),
            ours.cut(0, experts, expert),
            whole.cut(0, experts, expert),
            (0, 2, 1),
        )


WHOLE_MODEL = (
    NameLine("embedding", (EMBEDDING,), _whole),
    NameLine("norm.weight", ("model.norm.weight",), _whole),
    NameLine("head", (HEAD,), _whole),
)
GROUPED_ATTENTION = (
    NameLine("attn.bqkv", tuple(f"self_attn.{name}_proj.bias" for name in "qkv"), _heads),
    NameLine("attn.wqkv", tuple(f"self_attn.{name}_proj.weight" for name in "qkv"), _heads),
    NameLine("attn.q_norm.weight", ("self_attn.q_norm.weight",), _whole),
    NameLine("attn.k_norm.weight", ("self_attn.k_norm.weight",), _whole),
)
LATENT_ATTENTION = (
    NameLine("attn.q_a", ("self_attn.q_a_proj.weight",), _whole),
    NameLine("attn.q_a_norm.weight", ("self_attn.q_a_layernorm.weight",), _whole),
    NameLine("attn.q_b", ("self_attn.q_b_proj.weight",), _whole),
    NameLine("attn.kv_a", ("self_attn.kv_a_proj_with_mqa.weight",), _whole),
    NameLine("attn.kv_a_norm.weight", ("self_attn.kv_a_layernorm.weight",), _whole),
    NameLine("attn.kv_b", ("self_attn.kv_b_proj.weight",), _whole),
)
QUERIES_OF_HIDDEN = NameLine("attn.q_b", ("self_attn.q_proj.weight",), _whole)  # without a latent
EVERY_LAYER = (
    NameLine("attn_norm.weight", ("input_layernorm.weight",), _whole),
    NameLine("attn.wo", ("self_attn.o_proj.weight",), _whole),
    NameLine("body.norm.weight", ("post_attention_layernorm.weight",), _whole),
    NameLine("body.mlp.w_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), _gate_up),
    NameLine("body.mlp.w_down", ("mlp.down_proj.weight",), _whole),
)
STACKED_EXPERTS = (
    NameLine("body.experts.w_up", ("mlp.experts.gate_up_proj",), _stacked_gate_up),
    NameLine("body.experts.w_down", ("mlp.experts.down_proj",), _stacked_down),
)
EXPERTS = (
    NameLine("body.router.weight", ("mlp.gate.weight",), _whole),
    NameLine(
        "body.experts.w_up",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        _expert_gate_up,
    ),
    NameLine("body.experts.w_down", ("mlp.experts.{expert}.down_proj.weight",), _expert_down),
    *STACKED_EXPERTS,
)
SHARED_EXPERTS = (
    NameLine(
        "body.shared.w_up",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        _gate_up,
    ),
    NameLine("body.shared.w_down", ("mlp.shared_experts.down_proj.weight",), _whole),
    NameLine(BIAS, ("mlp.gate.e_score_correction_bias",), _whole),
)
MIXTRAL_EXPERTS = (
    NameLine("body.router.weight", ("block_sparse_moe.gate.weight",), _whole),
    NameLine("body.router.weight", ("mlp.gate.weight",), _whole),
    NameLine(
        "body.experts.w_up",
        (
            "block_sparse_moe.experts.{expert}.w1.weight",
            "block_sparse_moe.experts.{expert}.w3.weight",
        ),
        _expert_gate_up,
    ),
    NameLine("body.experts.w_down", ("block_sparse_moe.experts.{expert}.w2.weight",), _expert_down),
    *STACKED_EXPERTS,
)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One of our weights, and its spellings in files, the one that is written first."""

    weight: NamedWeight
    spellings: tuple[tuple[Piece, ...], ...]


def router_bias(model: ModelConfig, router: str) -> Iterator[NamedWeight]:
    """The bias of a router, if it has one: no weight, but kept and read as one."""
    if model.moe is not None and model.moe.score is Score.sigmoid:
        yield NamedWeight(f"{router}.bias_E", Weight((model.moe.num_experts,)))


def router_biases(model: ModelConfig) -> Iterator[NamedWeight]:
    """Those of all routers."""
    for layer in filter(model.is_moe_layer, range(model.num_layers)):
        yield from router_bias(model, f"layers.{layer}.body.router")


def without_query_latent(lines: Sequence[NameLine]) -> Sequence[NameLine]:
    """A table of latent attention for models whose queries are made from hidden states."""
    kept = (line for line in lines if not line.ours.startswith("attn.q_"))
    return (*kept, QUERIES_OF_HIDDEN)


def mapping(lines: Sequence[NameLine], model: ModelConfig, weight: NamedWeight) -> Mapping:
    """Where one of the model's weights lies in files. KeyError where the table has no line."""
    layer, name = layer_of(weight.name)
    found = [line for line in lines if line.ours == name]
    if not found:
        raise KeyError(weight.name)
    prefix = "" if layer is None else f"model.layers.{layer}."
    shape = weight.weight.shape
    spellings = (
        line.fit(model, shape, [prefix + theirs for theirs in line.theirs]) for line in found
    )
    return Mapping(weight, tuple(map(tuple, spellings)))


def layer_of(name: str) -> tuple[int | None, str]:
    """The layer of a weight, None where it is in none, and its name there."""
    if not name.startswith("layers."):
        return None, name
    _, layer, rest = name.split(".", 2)
    return int(layer), rest
