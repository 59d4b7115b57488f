"""Weights of a pipeline stage, and of the whole model, in order of use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from app.config import LayerSpec, LoraConfig, ModelConfig
from app.plan.model.layer import LayerWeights
from app.plan.model.lora import adapted
from app.plan.model.norm import NormWeights
from app.plan.model.vocabulary import table
from app.plan.model.weight import Weight
from app.plan.stages import Stage


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """A weight with its global name, the same in every layout, in checkpoints and in seeds."""

    name: str
    weight: Weight
    tied: bool = False  # another stage holds a copy

    @property
    def adapter(self) -> bool:
        """True if it belongs to an adapter."""
        return self.weight.rank is not None


def stage_weights(
    model: ModelConfig, stage: Stage, lora: LoraConfig | None = None
) -> Iterator[NamedWeight]:
    """Yield the weights of a stage in order of use: embedding, layers, norm, head; with `lora` each
    followed by its adapters.

    A last stage of its own has a copy of an embedding that serves as the head, or that layers
    behind the decoder's look up.
    """
    embedding = NamedWeight(
        "embedding", table(model), tied=model.copies_embedding and stage.embedding != stage.head
    )
    if stage.embedding:
        yield embedding
    listed: dict[LayerSpec, list[tuple[str, Weight]]] = {}
    for layer in stage.layers:
        spec = model.layer_specs[layer]
        if spec not in listed:
            weights = LayerWeights.of(model, spec)
            weights = weights if lora is None else adapted(weights, lora)
            listed[spec] = list(weights.weights())
        for name, weight in listed[spec]:
            yield NamedWeight(f"layers.{layer}.{name}", weight)
    if stage.head:
        for name, weight in NormWeights.of_hidden(model).weights("norm."):
            yield NamedWeight(name, weight)
    if stage.head and not stage.embedding and model.copies_embedding:
        yield embedding
    if stage.head and not model.tie_embeddings:
        yield NamedWeight("head", table(model))


def model_weights(model: ModelConfig, lora: LoraConfig | None = None) -> Iterator[NamedWeight]:
    """Return the weights of the whole model in order of use, with `lora` those of adapters too."""
    whole = Stage(tuple(model.all_layers), embedding=True, head=True)
    return stage_weights(model, whole, lora)
