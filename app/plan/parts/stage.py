"""Parts of a pipeline stage, and the trace of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto
from itertools import chain
from typing import TypeVar

from app.choices import Fp8Part
from app.config import Fp8Config, ModelConfig
from app.plan.model.fp8 import parts_in_fp8
from app.plan.model.layer import LayerWeights
from app.plan.model.norm import NormWeights
from app.plan.model.vocabulary import table
from app.plan.parts.layers import embedding_trace, head_trace, layer_trace
from app.plan.parts.parts import Sizes
from app.plan.parts.trace import ForwardTrace
from app.plan.recompute import RecomputeChoice
from app.plan.stages import Stage

T = TypeVar("T")


class StagePart(Enum):
    """Kind of part; parts of one kind have equal traces."""

    embedding = auto()
    dense_layer = auto()
    moe_layer = auto()
    fp8_dense_layer = auto()  # with FP8 GEMMs
    fp8_moe_layer = auto()
    head = auto()
    tied_head = auto()  # with the embedding on the same rank

    @property
    def is_layer(self) -> bool:
        """True for a decoder layer."""
        return self in LAYERS.values()


LAYERS = {  # (routed to experts, FP8 GEMMs) -> kind of part
    (False, False): StagePart.dense_layer,
    (True, False): StagePart.moe_layer,
    (False, True): StagePart.fp8_dense_layer,
    (True, True): StagePart.fp8_moe_layer,
}


def stage_parts(model: ModelConfig, stage: Stage, fp8: Fp8Config | None = None) -> list[StagePart]:
    """Return the parts of a stage, in the order of its forward."""
    narrow = [bool(parts_in_fp8(model, fp8 or Fp8Config(), layer)) for layer in stage.layers]
    layers = [
        LAYERS[model.is_moe_layer(layer), in_fp8]
        for layer, in_fp8 in zip(stage.layers, narrow, strict=True)
    ]
    first = [StagePart.embedding] if stage.embedding else []
    tied = stage.embedding and model.tie_embeddings
    last = [StagePart.tied_head if tied else StagePart.head] if stage.head else []
    return [*first, *layers, *last]


def part_trace(s: Sizes, part: StagePart, recompute: RecomputeChoice) -> ForwardTrace:
    """Return the trace of one part; layers are recomputed in part or whole."""
    fp8 = s.run.precision.fp8
    match part:
        case StagePart.embedding:
            return embedding_trace(s, table(s.model))
        case StagePart.dense_layer | StagePart.moe_layer:
            weights = LayerWeights.of(s.model, part is StagePart.moe_layer)
            return layer_trace(s, weights, recompute)
        case StagePart.fp8_dense_layer | StagePart.fp8_moe_layer:
            weights = LayerWeights.of(s.model, part is StagePart.fp8_moe_layer)
            own = replace(
                s,
                in_fp8=fp8.recipe if Fp8Part.linear in fp8.include else None,
                experts_in_fp8=Fp8Part.experts in fp8.include,
            )
            return layer_trace(own, weights, recompute)
        case StagePart.head | StagePart.tied_head:
            tied = part is StagePart.tied_head
            own = replace(s, in_fp8=fp8.recipe) if Fp8Part.head in fp8.include else s
            return head_trace(own, NormWeights.of_hidden(s.model), table(s.model), tied=tied)


def fold_stages(
    s: Sizes, stages: Sequence[Stage], fold: Callable[[ForwardTrace], T]
) -> list[list[tuple[T, int]]]:
    """Return, per stage, `fold` of the trace of each kind of part and the number of such parts.

    Traces are of microbatches that are not spared, and recorded once for all stages.
    """
    fp8 = s.run.precision.fp8
    counts = [Counter(stage_parts(s.model, stage, fp8)) for stage in stages]
    kinds = set(chain.from_iterable(counts))
    folded = {part: fold(part_trace(s, part, s.recompute.usual)) for part in kinds}
    return [[(folded[part], times) for part, times in count.items()] for count in counts]
