"""Tables of Hugging Face tensor names and our weights.

A table has a line for each of our weights, used for both import and export. Families share lines; a
family with other names has lines of its own. Several lines for one weight are alternative
spellings: all are read, the first is written.

`transformers` 4 stores a tensor per expert. Version 5 keeps all experts of a layer in one
three-dimensional tensor; it still saves a tensor per expert unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.config import ModelConfig
from app.hf.weight_part import WeightPart
from app.plan.model.stage import NamedWeight
from app.plan.model.weight import Weight
from app.plan.sharding.reshard import Block

Shape = tuple[int, ...]
# returns the parts of a weight of this shape, given the names of their tensors
Fit = Callable[[ModelConfig, Shape, Sequence[str]], Iterator[WeightPart]]
BIAS = "body.router.bias_E"  # router bias: a buffer, but saved like a weight
EMBEDDING = "model.embed_tokens.weight"
ADAPTED = "base_model.model."  # before names of modules in the files of `peft`
HEAD = "lm_head.weight"  # with tied embeddings some files contain a copy


@dataclass(frozen=True, slots=True)
class NameLine:
    """One of our weights, their tensors that hold it, and the function that maps them."""

    ours: str  # our name, without the layer's prefix
    theirs: tuple[str, ...]
    fit: Fit


def whole(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map a tensor that is the same in both."""
    (name,) = theirs
    yield WeightPart.same(name, shape)


def heads(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map queries, keys and values; ours are ordered by key/value head: queries, key, value."""
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
        yield WeightPart(name, (rows, *columns), Block(apart, start, stop), their_whole, order)
        first += heads


def _heads_of_pairs(
    model: ModelConfig, shape: Shape, theirs: Sequence[str]
) -> Iterator[WeightPart]:
    """Map queries, keys and values as `heads`; values 2i and 2i + 1 of their query and key heads
    are values i and i + width / 2 of ours.
    """
    groups, width, columns = model.num_kv_heads, model.head_width, shape[1:]
    queries = model.num_heads // groups
    apart = (groups, queries + 2, 2, width // 2, *columns)
    dims = tuple(range(len(apart)))
    first = 0
    for name, heads in zip(theirs, (queries, 1, 1), strict=True):
        stop = (groups, first + heads, 2, width // 2, *columns)
        ours = Block(apart, (0, first, *(0 for _ in dims[2:])), stop)
        same = name == theirs[-1]  # values are not rotated
        pair = (2, width // 2) if same else (width // 2, 2)
        order = dims if same else (0, 1, 3, 2, *dims[4:])
        whole = Block.whole(groups, heads, *pair, *columns)
        yield WeightPart(name, (groups * heads * width, *columns), ours, whole, order)
        first += heads


def row(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map a vector that is a matrix of one row in files."""
    (name,) = theirs
    yield WeightPart(name, (1, *shape), Block.whole(*shape, 1), Block.whole(1, *shape), (1, 0))


def gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map gate and up projections, or their biases, one after the other in ours."""
    apart = shape[1:]
    dims = tuple(range(len(shape)))
    for number, name in enumerate(theirs):
        ours = Block.whole(*shape).cut(0, 2, number)
        yield WeightPart(name, apart, ours, Block.whole(1, *apart), dims)


def expert_gate_up(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map gate and up projections of experts, a tensor each."""
    experts, hidden, _, ffn = shape
    for expert in range(experts):
        for number, name in enumerate(theirs):
            ours = Block(shape, (expert, 0, number, 0), (expert + 1, hidden, number + 1, ffn))
            whole = Block.whole(1, 1, ffn, hidden)
            yield WeightPart(name.format(expert=expert), (ffn, hidden), ours, whole, (0, 3, 1, 2))


def expert_down(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map down projections of experts, a tensor each."""
    experts, ffn, hidden = shape
    (name,) = theirs
    for expert in range(experts):
        ours = Block(shape, (expert, 0, 0), (expert + 1, ffn, hidden))
        whole = Block.whole(1, hidden, ffn)
        yield WeightPart(name.format(expert=expert), (hidden, ffn), ours, whole, (0, 2, 1))


def _stacked_gate_up(
    model: ModelConfig, shape: Shape, theirs: Sequence[str]
) -> Iterator[WeightPart]:
    experts, hidden, _, ffn = shape
    (name,) = theirs
    apart = (experts, 2, ffn, hidden)
    for number in range(2):
        ours = Block(shape, (0, 0, number, 0), (experts, hidden, number + 1, ffn))
        half = Block(apart, (0, number, 0, 0), (experts, number + 1, ffn, hidden))
        for expert in range(experts):  # each expert's gate (or up) half is one range of rows
            yield WeightPart(
                name,
                (experts, 2 * ffn, hidden),
                ours.cut(0, experts, expert),
                half.cut(0, experts, expert),
                (0, 3, 1, 2),
            )


def _stacked_down(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    experts, ffn, hidden = shape
    (name,) = theirs
    ours, whole = Block.whole(*shape), Block.whole(experts, hidden, ffn)
    for expert in range(experts):
        yield WeightPart(
            name,
            (experts, hidden, ffn),
            ours.cut(0, experts, expert),
            whole.cut(0, experts, expert),
            (0, 2, 1),
        )


def alternating(model: ModelConfig, shape: Shape, theirs: Sequence[str]) -> Iterator[WeightPart]:
    """Map gate and up projections, or their biases: in files the last dimension alternates."""
    (name,) = theirs
    *lead, both, ffn = shape
    apart = (*lead, ffn, both)
    dims = tuple(range(len(lead)))
    yield WeightPart(
        name,
        (*lead, both * ffn),
        Block.whole(*shape),
        Block.whole(*apart),
        (*dims, len(lead) + 1, len(lead)),
    )


def mlp_lines(ours: str, theirs: str) -> tuple[NameLine, ...]:
    """Return the lines of a feed-forward, weights and biases."""
    gate, up, down = (f"{theirs}.{name}_proj" for name in ("gate", "up", "down"))
    return (
        NameLine(f"{ours}.b_up", (f"{gate}.bias", f"{up}.bias"), gate_up),
        NameLine(f"{ours}.b_down", (f"{down}.bias",), whole),
        NameLine(f"{ours}.w_up", (f"{gate}.weight", f"{up}.weight"), gate_up),
        NameLine(f"{ours}.w_down", (f"{down}.weight",), whole),
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
    NameLine(ours, tuple(f"self_attn.{name}_proj.{kind}" for name in "qkv"), _heads_of_pairs)
    for ours, kind in (("attn.bqkv", "bias"), ("attn.wqkv", "weight"))
)
NORMS_BEHIND = (
    NameLine("attn_out_norm.weight", ("post_attention_layernorm.weight",), whole),
    NameLine("body.out_norm.weight", ("post_feedforward_layernorm.weight",), whole),
)
STACKED_EXPERTS = (
    NameLine("body.experts.w_up", ("mlp.experts.gate_up_proj",), _stacked_gate_up),
    NameLine("body.experts.w_down", ("mlp.experts.down_proj",), _stacked_down),
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
PREDICTS = NameLine("ahead.proj", ("eh_proj.weight",), whole)
PREDICTION = (  # around a layer of multi-token prediction
    NameLine("ahead.embedding_norm.weight", ("enorm.weight",), whole),
    NameLine("ahead.hidden_norm.weight", ("hnorm.weight",), whole),
    PREDICTS,
    NameLine("ahead.norm.weight", ("shared_head.norm.weight",), whole),
)
PREDICTED = "num_nextn_predict_layers"  # key of config.json: their number


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


def copies(model: ModelConfig) -> Iterator[tuple[str, str, str]]:
    """Yield names of tensors of which layers of multi-token prediction have copies in files: of the
    copy, of the tensor, and of our weight.
    """
    for layer in model.all_layers[model.num_layers :]:
        yield f"model.layers.{layer}.embed_tokens.weight", EMBEDDING, "embedding"
        head = (EMBEDDING, "embedding") if model.tie_embeddings else (HEAD, "head")
        yield f"model.layers.{layer}.shared_head.head.weight", *head


def without_query_latent(lines: Sequence[NameLine]) -> Sequence[NameLine]:
    """Return a table of latent attention for models whose queries are not compressed."""
    kept = (line for line in lines if not line.ours.startswith("attn.q_"))
    return (*kept, QUERIES_OF_HIDDEN)


def mapping(lines: Sequence[NameLine], model: ModelConfig, weight: NamedWeight) -> Mapping:
    """Return the mapping of one of the model's weights. Raises KeyError without a line for it."""
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


def adapter_tensor(layer: int | None, theirs: str, letter: str) -> str:
    """Return the name in `peft` of a matrix, A or B, of the adapter of one of a layer's tensors."""
    module = theirs.removesuffix(".weight")
    return f"{ADAPTED}model.layers.{layer}.{module}.lora_{letter}.weight"


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
