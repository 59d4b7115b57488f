"""Parts of a pipeline stage: embedding, layers, final norm and loss; the operations of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeVar

from app.choices import BlockKind, Fp8Part, Recompute
from app.config import Fp8Config, LayerSpec, ModelConfig, Run
from app.config.attention import Rope
from app.plan.layout import ParallelLayout
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.fp8 import parts_in_fp8
from app.plan.model.layer import LayerWeights
from app.plan.model.lora import adapted
from app.plan.model.norm import NormWeights
from app.plan.model.vocabulary import logits_stride, table
from app.plan.model.weight import Weight
from app.plan.parts.attention import attention
from app.plan.parts.dispatcher import busiest_load
from app.plan.parts.experts import moe_body
from app.plan.parts.known import KnownParts
from app.plan.parts.linear import column_parallel, feed_forward, norm, scattered
from app.plan.parts.trace import (
    Operation,
    Sizes,
    Trace,
    Work,
    forward_only,
    splits_backward,
)
from app.plan.phases import PhaseName
from app.plan.recompute import RecomputeChoice, recompute_policy
from app.plan.sharding.blocks import ShardCoords
from app.plan.sharding.frozen import FrozenByPlace
from app.plan.stages import Stage

# bytes that the loss saves per token: index of its label, log-sum-exp, validity
PER_LABEL = 8 + 4 + 1
SLOPE_TOKENS = 1024  # tokens whose logits' slopes exist at once
LOSS_KERNELS = 9  # kernel launches after the logits

T = TypeVar("T")


class StageEnd(Enum):
    """Part of the first or the last stage."""

    embedding = auto()
    head = auto()


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Decoder layer of a stage."""

    spec: LayerSpec
    in_fp8: bool = False  # has FP8 GEMMs


@dataclass(frozen=True, slots=True)
class FrozenPart:
    """Part of a stage in a run with frozen parameters."""

    part: StageEnd | LayerPart
    frozen: frozenset[str]  # names of its weights that are not trained, without the layer's number
    reached: bool  # backward reaches it
    begins: bool = False  # its first adapter is where backward ends


StagePart = StageEnd | LayerPart | FrozenPart  # equal parts have equal operations


def sizes_of(
    run: Run,
    layout: ParallelLayout,
    load: float | None = None,
    known: KnownParts | None = None,
) -> Sizes:
    """Return the sizes of one microbatch on one rank; `load` None is that of the busiest rank.

    known: operations shared with plans of other runs.
    """
    load, splits = busiest_load(run) if load is None else load, splits_backward(run)
    return Sizes(
        run,
        layout,
        ShardCoords.of(layout, 0),
        recompute=recompute_policy(run),
        load=load,
        known=None if known is None else known.sizes(run, layout, load, splits),
    )


def stage_parts(run: Run, stage: Stage) -> list[StagePart]:
    """Return the parts of a stage, in the order of its forward."""
    parts = _parts(run.model, stage, run.precision.fp8)
    if not run.freezes:
        return [*parts]
    held = FrozenByPlace.of(run)
    places = [
        *(["embedding"] if stage.embedding else []),
        *map(str, stage.layers),
        *(["head"] if stage.head else []),
    ]
    return [
        FrozenPart(
            part,
            held.names[place],
            held.reached(place),
            begins=run.adapters is not None and place == str(held.first),
        )
        for part, place in zip(parts, places, strict=True)
    ]


def _parts(model: ModelConfig, stage: Stage, fp8: Fp8Config) -> list[StageEnd | LayerPart]:
    specs = model.layer_specs
    layers = [
        LayerPart(specs[layer], bool(parts_in_fp8(model, fp8, layer))) for layer in stage.layers
    ]
    first = [StageEnd.embedding] if stage.embedding else []
    return [*first, *layers, *([StageEnd.head] if stage.head else [])]


def saved_positions(part: StagePart) -> Rope | None:
    """Return the rotary positions that backward of a part reads; None: it reads none."""
    if isinstance(part, FrozenPart):
        return saved_positions(part.part) if part.reached else None
    return part.spec.attention.rope if isinstance(part, LayerPart) else None


def part_operations(s: Sizes, part: StagePart, recompute: RecomputeChoice) -> list[Operation]:
    """Return the operations of one part; layers are recomputed in part or whole."""
    if s.known is None:
        return _part_operations(s, part, recompute)
    key = part, recompute
    if key not in s.known.operations:
        s.known.operations[key] = _part_operations(s, part, recompute)
    found: list[Operation] = s.known.operations[key]
    return found


def _part_operations(s: Sizes, part: StagePart, recompute: RecomputeChoice) -> list[Operation]:
    if isinstance(part, FrozenPart):
        ops = _operations(s, part.part, recompute, frozen=part.frozen)
        if part.begins and not recompute.whole_layers:
            first = next(nth for nth, op in enumerate(ops) if op.weight and op.trained)
            return [*map(forward_only, ops[:first]), *ops[first:]]
        if part.reached:
            return ops
        # backward of the head's table ends behind the final norm, the first operation
        end = 1 if part.part is StageEnd.head else len(ops)
        return [*map(forward_only, ops[:end]), *ops[end:]]
    return _operations(s, part, recompute)


def _operations(
    s: Sizes,
    part: StageEnd | LayerPart,
    recompute: RecomputeChoice,
    *,
    frozen: frozenset[str] = frozenset(),
) -> list[Operation]:
    fp8 = s.run.precision.fp8
    if isinstance(part, StageEnd):
        name = "embedding" if s.model.tie_embeddings else part.name
        weight = replace(table(s.model), trained=name not in frozen)
        if part is StageEnd.embedding:
            return embedding(s, weight)
        in_fp8 = fp8.recipe if Fp8Part.head in fp8.include else None
        return head(replace(s, in_fp8=in_fp8), weight)
    if part.in_fp8:
        s = replace(
            s,
            in_fp8=fp8.recipe if Fp8Part.linear in fp8.include else None,
            experts_in_fp8=Fp8Part.experts in fp8.include,
        )
    weights = LayerWeights.of(s.model, part.spec)
    if s.run.adapters is not None:
        weights = adapted(weights, s.run.adapters)
    return layer(s, part.spec, weights.without(frozen) if frozen else weights, recompute)


def layer(
    s: Sizes, spec: LayerSpec, weights: LayerWeights, recompute: RecomputeChoice
) -> list[Operation]:
    """Dense or MoE layer under a choice of recomputation; one that predicts ahead with what is
    around it.
    """
    t, x = Trace(s, recompute), s.stream
    again = t.reruns(Recompute.norm)
    ahead = weights.ahead
    if ahead is not None:
        t.phase = "mtp"
        _lookup(t, table(s.model))
    with t.rerun(recompute.whole_layers, keeps=x if ahead is None else 2 * x):
        if ahead is not None:
            norm(t, x)
            norm(t, x)
            column_parallel(t, t.op(Work.other, 2 * x, 2 * x), ahead.proj)
        t.phase = PhaseName.attn
        h = _input(t, x, weights.attn_norm)
        attention(t, h, spec.attention, weights.attn, saved=weights.attn_norm is None or not again)
        _added(t, x, weights.attn_out_norm)
        if isinstance(weights.body, MoEBodyWeights):
            moe_body(t, x, weights.body)
        else:
            t.phase = PhaseName.mlp
            body = weights.body
            beside = s.model.block is BlockKind.parallel_norms  # of the input of attention's norm
            h = _input(t, x, body.norm, saved=not beside)
            # in parallel to attention, which has saved the same input already
            kept = weights.attn.first.keeps_input
            shared = body.norm is None and weights.attn_norm is not None and kept
            saved = not shared and (body.norm is None or not again)
            feed_forward(t, h, body.mlp, saved=saved, part=Recompute.mlp_act)
            _added(t, x, body.out_norm)
        if ahead is not None:
            t.phase = "mtp"
            norm(t, x)
    return t.ops


def _input(t: Trace, x: int, weights: NormWeights | None, *, saved: bool = True) -> int:
    """Norm of the residual stream; the stream itself without one."""
    return x if weights is None else norm(t, x, rerun=t.reruns(Recompute.norm), saved=saved)


def _added(t: Trace, x: int, weights: NormWeights | None) -> None:
    """Sum of the residual stream and an output, which may have a norm."""
    if weights is not None:
        norm(t, x)
    t.add(x)


def embedding(s: Sizes, weight: Weight) -> list[Operation]:
    """Lookup; with tp > 1 each rank has a part of the vocabulary."""
    t = Trace(s, phase="embedding")
    _lookup(t, weight)
    return t.ops


def _lookup(t: Trace, weight: Weight) -> None:
    s = t.sizes
    cut = s.layout.tp > 1
    whole = s.tokens * weight.shape[1] * s.size
    saves, kernels = (9 * s.tokens, 5) if cut else (0, 1)
    t.op(Work.other, 0, whole, saves * weight.trained, weight=s.weight(weight), stored=True,
         kernels=kernels, trained=weight.trained)  # fmt: skip
    local = scattered(t, whole)
    if s.model.embedding_factor != 1:
        t.op(Work.other, local, local)


def head(s: Sizes, weight: Weight) -> list[Operation]:
    """Final norm and loss (`app.model.layers.loss`), of further predictions too."""
    t = Trace(s, phase="head")
    h = norm(t, s.stream)
    tokens = s.tokens
    if s.model.mtp.layers:
        h, tokens = h * (1 + s.model.mtp.layers), tokens * (1 + s.model.mtp.layers)
        t.op(Work.other, h, h)
    stride = logits_stride(s.shape(weight)[0])
    # slopes of capped logits, fp32, of some tokens at a time (`app.model.layers.logits`)
    slopes = 0
    if s.model.logit_softcap is not None:
        slopes = 2 * 4 * min(SLOPE_TOKENS, tokens) * s.shape(weight)[0]
    if s.run.loss.chunk_tokens is None:
        # backward overwrites the logits with their gradient
        logits = column_parallel(t, h, weight, stored=s.model.tie_embeddings, stride=stride)
        saves = logits + PER_LABEL * tokens
        scratch = 0, slopes
        t.op(Work.loss, logits, 4, saves, scratch=scratch, passes=True, kernels=LOSS_KERNELS)
        return t.ops
    # logits of a chunk of tokens at a time, recomputed in backward; the weight gradient is fp32
    chunk = min(s.run.loss.chunk_tokens, tokens)
    whole = s.layout.tp * h
    table_sum = 4 * s.weight(weight) // s.size * weight.trained
    logits = chunk * stride * s.size
    following = logits if chunk < tokens else 0  # made before these are freed
    # beside the chunk's weight gradient
    least = logits + max(following, s.weight(weight) * weight.trained)
    column = Trace(s)
    column_parallel(column, h, weight)
    (gemm,) = column.ops
    t.op(
        Work.gemm,
        h,
        4,
        h + PER_LABEL * tokens,
        weight=gemm.weight,
        stored=gemm.stored,
        waits=table_sum,
        scratch=(whole - h + logits + following, 2 * whole - 2 * h + table_sum + least + slopes),
        kernels=LOSS_KERNELS + 2 * -(-tokens // chunk),
        flops=gemm.flops,
        flops_recomputed=gemm.flops,
        fp8=gemm.fp8,
        sends=gemm.sends,
        trained=gemm.trained,
    )
    return t.ops


def parts_of(s: Sizes, stage: Stage) -> tuple[StagePart, ...]:
    """Return the parts of a stage (`stage_parts`), made once for runs of equal sizes."""
    if s.known is None:
        return tuple(stage_parts(s.run, stage))
    # graphs decide which frozen parts backward reaches
    key = "parts", stage, s.run.freezes and s.run.cuda_graph.of_parts
    return s.known.sum(key, lambda: tuple(stage_parts(s.run, stage)))


def part_counts(s: Sizes, stage: Stage) -> tuple[tuple[StagePart, int], ...]:
    """Return each kind of part of a stage, in order of its first, and the number of them."""
    if s.known is None:
        return tuple(Counter(stage_parts(s.run, stage)).items())
    key = "counts", stage, s.run.freezes and s.run.cuda_graph.of_parts
    return s.known.sum(key, lambda: tuple(Counter(parts_of(s, stage)).items()))


def fold_stages(
    s: Sizes,
    stages: Sequence[Stage],
    fold: Callable[[Sequence[Operation]], T],
    name: Hashable = None,
) -> list[list[tuple[T, int]]]:
    """Return, per stage, `fold` of the operations of each kind of part and the number of parts.

    The operations are those of microbatches that are not spared. Stages with equal parts share one
    list. name: everything that `fold` depends on, by which plans of other runs share its results;
    None shares none.
    """
    usual = s.recompute.usual
    folded: dict[StagePart, T] = {}
    rows: dict[tuple[tuple[StagePart, int], ...], list[tuple[T, int]]] = {}
    kept = None if s.known is None or name is None else s.known.named(name)

    def fold_part(part: StagePart) -> T:
        if part not in folded:
            if kept is None:
                folded[part] = fold(part_operations(s, part, usual))
            else:
                key = part, usual
                if key not in kept:
                    kept[key] = fold(part_operations(s, part, usual))
                folded[part] = kept[key]
        return folded[part]

    found = []
    for stage in stages:
        counts = part_counts(s, stage)
        if counts not in rows:
            rows[counts] = [(fold_part(part), times) for part, times in counts]
        found.append(rows[counts])
    return found
