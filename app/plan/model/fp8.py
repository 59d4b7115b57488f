"""Which weights have their products in eight bits (`precision.fp8`)."""

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

MULTIPLE = 16  # of both widths of a matrix in eight bits: tensor cores load that many bytes


def fp8_weights(model: ModelConfig, fp8: Fp8Config, stage: Stage) -> Iterator[NamedWeight]:
    """Those of a stage in order of use: matrices of attention, of dense feed-forwards and of shared
    experts, and the head's table. Routers, gates of shared experts and routed experts are none.
    """
    layers = layers_in_8(model, fp8)
    for index in (each for each in stage.layers if each in layers):
        for name, weight in layer_matrices(model, model.is_moe_layer(index)):
            yield NamedWeight(f"layers.{index}.{name}", weight)
    if fp8.recipe is not None and Fp8Part.head in fp8.include and stage.head:
        yield NamedWeight("embedding" if model.tie_embeddings else "head", table(model))


def part_of(named: NamedWeight) -> Fp8Part:
    """What a weight with products in eight bits belongs to."""
    return Fp8Part.linear if named.name.startswith("layers.") else Fp8Part.head


def layers_in_8(model: ModelConfig, fp8: Fp8Config) -> range:
    """Layers whose linear layers compute in eight bits."""
    if fp8.recipe is None or Fp8Part.linear not in fp8.include:
        return range(0)
    return range(fp8.first_layers, model.num_layers - fp8.last_layers)


def layer_matrices(model: ModelConfig, routed: bool) -> Iterator[tuple[str, Weight]]:
    """The matrices of linear layers of one layer, by name within it."""
    weights = LayerWeights.of(model, routed)
    parts: list[tuple[str, Part]] = [("attn.", weights.attn)]
    if isinstance(weights.body, MoEBodyWeights):
        parts += [("body.shared.", weights.body.shared)] if weights.body.shared else []
    else:
        parts.append(("body.mlp.", weights.body.mlp))
    for path, part in parts:
        for name, weight in part.weights(path):
            if len(weight.shape) > 1:
                yield name, weight
