"""Weights whose GEMMs run in FP8 (`precision.fp8`)."""

from __future__ import annotations

from collections.abc import Iterator

from app.choices import Fp8Part
from app.config import Fp8Config, LayerSpec, ModelConfig
from app.plan.model.experts import MoEBodyWeights
from app.plan.model.layer import LayerWeights
from app.plan.model.stage import NamedWeight
from app.plan.model.vocabulary import table
from app.plan.model.weight import Part, Weight
from app.plan.stages import Stage

MULTIPLE = 16  # of both widths of an FP8 matrix: tensor cores load 16 bytes at a time


def fp8_weights(model: ModelConfig, fp8: Fp8Config, stage: Stage) -> Iterator[NamedWeight]:
    """Yield the FP8 weights of a stage in order of use.

    Matrices of attention, dense feed-forwards, shared and routed experts, and the head; never
    routers or gates of shared experts.
    """
    for index in stage.layers:
        parts = parts_in_fp8(model, fp8, index)
        for name, weight in layer_matrices(model, model.layer_specs[index]):
            named = NamedWeight(f"layers.{index}.{name}", weight)
            if part_of(named) in parts:
                yield named
    if fp8.recipe is not None and Fp8Part.head in fp8.include and stage.head:
        yield NamedWeight("embedding" if model.tie_embeddings else "head", table(model))


def part_of(named: NamedWeight) -> Fp8Part:
    """Return the part of `precision.fp8.include` that an FP8 weight belongs to."""
    if not named.name.startswith("layers."):
        return Fp8Part.head
    return Fp8Part.linear if named.weight.ep is None else Fp8Part.experts


def parts_in_fp8(model: ModelConfig, fp8: Fp8Config, layer: int) -> set[Fp8Part]:
    """Return the parts of a layer that run in FP8."""
    inside = range(fp8.first_layers, model.num_layers - fp8.last_layers)
    if fp8.recipe is None or layer not in inside:
        return set()
    own = {Fp8Part.linear, Fp8Part.experts} if model.is_moe_layer(layer) else {Fp8Part.linear}
    return own & set(fp8.include)


def layer_matrices(model: ModelConfig, spec: LayerSpec) -> Iterator[tuple[str, Weight]]:
    """Yield the matrices of linear layers and routed experts of one layer, by name within it."""
    weights = LayerWeights.of(model, spec)
    parts: list[tuple[str, Part]] = [("attn.", weights.attn)]
    if isinstance(weights.body, MoEBodyWeights):
        parts += [("body.shared.", weights.body.shared)] if weights.body.shared else []
        parts.append(("body.experts.", weights.body.experts))
    else:
        parts.append(("body.mlp.", weights.body.mlp))
    for path, part in parts:
        for name, weight in part.weights(path):
            if weight.linear:
                yield name, weight
