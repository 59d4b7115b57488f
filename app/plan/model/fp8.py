"""Which weights have their products in eight bits (`precision.fp8`)."""

from __future__ import annotations

from collections.abc import Iterator

from app.choices import Fp8Part
from app.config import ModelConfig
from app.config.layout import Fp8Config
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
    if fp8.recipe is None:
        return
    if Fp8Part.linear in fp8.include:
        layers = range(fp8.first_layers, model.num_layers - fp8.last_layers)
        for index in stage.layers:
            if index in layers:
                for name, weight in layer_matrices(model, model.is_moe_layer(index)):
                    yield NamedWeight(f"layers.{index}.{name}", weight)
    if Fp8Part.head in fp8.include and stage.head:
        yield NamedWeight("embedding" if model.tie_embeddings else "head", table(model))


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
