"""Which weights have their products in FP8 (`precision.fp8`)."""

from __future__ import annotations

from collections.abc import Iterator

from app.choices import Fp8Part
from app.config import Fp8Config, ModelConfig
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.layer import LayerWeights
from app.plan.model.stage import NamedWeight
from app.plan.model.vocabulary import table
from app.plan.model.weight import Part, Weight
from app.plan.stages import Stage

MULTIPLE = 16  # of both widths of a matrix in FP8: tensor cores load that many bytes


def fp8_weights(model: ModelConfig, fp8: Fp8Config, stage: Stage) -> Iterator[NamedWeight]:
    """Those of a stage in order of use: matrices of attention, of dense feed-forwards and of shared
    experts, those of routed experts, and the head's table. Routers and gates of shared experts are
    none.
    """
    for index in stage.layers:
        parts = parts_in_8(model, fp8, index)
        for name, weight in layer_matrices(model, model.is_moe_layer(index)):
            named = NamedWeight(f"layers.{index}.{name}", weight)
            if part_of(named) in parts:
                yield named
    if fp8.recipe is not None and Fp8Part.head in fp8.include and stage.head:
        yield NamedWeight("embedding" if model.tie_embeddings else "head", table(model))


def part_of(named: NamedWeight) -> Fp8Part:
    """What a weight with products in FP8 belongs to."""
    if not named.name.startswith("layers."):
        return Fp8Part.head
    return Fp8Part.linear if named.weight.ep is None else Fp8Part.experts


def parts_in_8(model: ModelConfig, fp8: Fp8Config, layer: int) -> set[Fp8Part]:
    """What of a layer computes in FP8."""
    inside = range(fp8.first_layers, model.num_layers - fp8.last_layers)
    if fp8.recipe is None or layer not in inside:
        return set()
    own = {Fp8Part.linear, Fp8Part.experts} if model.is_moe_layer(layer) else {Fp8Part.linear}
    return own & set(fp8.include)


def layer_matrices(model: ModelConfig, routed: bool) -> Iterator[tuple[str, Weight]]:
    """The matrices of linear layers and of routed experts of one layer, by name within it."""
    weights = LayerWeights.of(model, routed)
    parts: list[tuple[str, Part]] = [("attn.", weights.attn)]
    if isinstance(weights.body, MoEBodyWeights):
        parts += [("body.shared.", weights.body.shared)] if weights.body.shared else []
        parts.append(("body.experts.", weights.body.experts))
    else:
        parts.append(("body.mlp.", weights.body.mlp))
    for path, part in parts:
        for name, weight in part.weights(path):
            if len(weight.shape) > 1:
                yield name, weight
