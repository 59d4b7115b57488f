"""What a rank holds of a stage: its parameters in the engine's order, and their places in buffers.

Tensor parallelism cuts the rows of column-parallel weights (`wqkv`, `w_up`, embedding, head) and
the columns of row-parallel ones (`wo`, `w_down`); norms, the router and the gate of the shared
expert are whole on every rank. Expert parallelism gives a rank whole experts, expert tensor
parallelism cuts their hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from app.config import ModelConfig, MoEConfig, OptimConfig
from app.plan.layout import ParallelLayout
from app.plan.shards import BufferLayout, buffer_layout
from app.plan.stages import Stage

ALIGN = 64  # elements: every parameter starts where vector loads and grouped products can begin
# elements: large enough to use the links well, also with many ranks
BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Parameter:
    """This rank's part of one parameter."""

    name: str  # global name, the same in every layout
    shape: tuple[int, ...]
    expert: bool  # belongs to routed experts
    tied: bool = False  # another stage holds a copy

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """Layouts of a chunk's two buffers; None where it has no such parameter."""

    dense: BufferLayout | None  # shared by the ranks of dp and cp
    expert: BufferLayout | None  # shared by the ranks of edp


def chunk_parameters(
    model: ModelConfig, stage: Stage, layout: ParallelLayout
) -> tuple[Parameter, ...]:
    """Parameters of a stage on each of its ranks, in order of use: embedding, layers, norm, head.

    Within a layer a module's own come before its children's. A tied table is used as the head on a
    last stage of its own.
    """
    copied = {"embedding"} if model.tie_embeddings and stage.embedding != stage.head else set()
    return tuple(
        Parameter(name, shape, expert=".experts." in name, tied=name in copied)
        for name, shape in _stage(model, stage, layout)
    )


def chunk_buffers(
    parameters: Sequence[Parameter], layout: ParallelLayout, optim: OptimConfig
) -> ChunkBuffers:
    """Where the parameters of a chunk lie, as the optimizer shards them.

    A tied parameter has a bucket of its own, so that its shards are the same on both stages.
    """
    dense = [parameter for parameter in parameters if not parameter.expert]
    expert = [parameter for parameter in parameters if parameter.expert]
    return ChunkBuffers(
        _aligned(dense, layout.dp * layout.cp, optim), _aligned(expert, layout.edp, optim)
    )


def _aligned(
    parameters: Sequence[Parameter], world: int, optim: OptimConfig
) -> BufferLayout | None:
    if not parameters:
        return None
    # without overlap, several buckets bring nothing
    together = world == 1 or not (optim.overlap_grads or optim.overlap_params)
    bucket = None if together else optim.bucket_numel or max(BUCKET, BUCKET_PER_RANK * world)
    numels = [parameter.numel for parameter in parameters]
    tied = [place for place, parameter in enumerate(parameters) if parameter.tied]
    return buffer_layout(
        numels, world, bucket_numel=bucket, param_align=ALIGN, shard_align=ALIGN, alone=tied
    )


Named = tuple[str, tuple[int, ...]]  # name, shape


def _stage(model: ModelConfig, stage: Stage, layout: ParallelLayout) -> Iterator[Named]:
    table = model.vocab_size // layout.tp, model.hidden_size
    if stage.embedding:
        yield "embedding", table
    for index in stage.layers:
        for name, shape in _layer(model, index, layout):
            yield f"layers.{index}.{name}", shape
    if stage.head:
        yield "norm.weight", (model.hidden_size,)
    if stage.head and not model.tie_embeddings:
        yield "head", table
    elif stage.head and not stage.embedding:
        yield "embedding", table  # a copy, which is this stage's head


def _layer(model: ModelConfig, index: int, layout: ParallelLayout) -> Iterator[Named]:
    hidden = model.hidden_size
    width = model.head_width
    yield "attn_norm.weight", (hidden,)
    yield "attn.wqkv", ((model.num_heads + 2 * model.num_kv_heads) // layout.tp * width, hidden)
    yield "attn.wo", (hidden, model.num_heads // layout.tp * width)
    if model.qk_norm:
        yield "attn.q_norm.weight", (width,)
        yield "attn.k_norm.weight", (width,)
    if model.moe and model.is_moe_layer(index):
        yield from _experts(hidden, model.moe, layout)
    else:
        yield "body.norm.weight", (hidden,)
        yield from _mlp("body.mlp", hidden, model.ffn_hidden_size // layout.tp)


def _experts(hidden: int, moe: MoEConfig, layout: ParallelLayout) -> Iterator[Named]:
    count = moe.num_experts // layout.ep
    width = moe.ffn_hidden_size // layout.expert_tp
    if moe.shared_gate:
        yield "body.shared_gate", (1, hidden)
    yield "body.norm.weight", (hidden,)
    yield "body.router.weight", (moe.num_experts, hidden)
    yield "body.experts.w_up", (count, hidden, 2 * width)
    yield "body.experts.w_down", (count, width, hidden)
    if moe.shared_ffn_hidden_size:
        yield from _mlp("body.shared", hidden, moe.shared_ffn_hidden_size // layout.tp)


def _mlp(name: str, hidden: int, width: int) -> Iterator[Named]:
    yield f"{name}.w_up", (2 * width, hidden)
    yield f"{name}.w_down", (hidden, width)
