"""A family of Hugging Face models: names, tensors and configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.config import ModelConfig, MoEConfig
from app.hf import config_json as config
from app.hf import tables
from app.hf.behind import NONE, Behind
from app.hf.tables import NameLine
from app.hf.their_config import TheirConfig
from app.plan.model.stage import NamedWeight, model_weights


@dataclass(frozen=True, slots=True)
class Family:
    """Models that differ only in their sizes."""

    model_type: str  # in config.json
    architecture: str  # class in `transformers`
    read: Callable[[TheirConfig], dict[str, Any]]  # returns fields of our configuration
    lines: tuple[NameLine, ...]  # weights
    written_moe: Callable[[MoEConfig], dict[str, Any]] | None = None  # None for dense families
    layers: tuple[str, ...] = ()  # keys of what layers differ in, of `config_json.written_layers`
    # returns keys of config.json that other families lack, or spell otherwise
    more: Callable[[ModelConfig], Mapping[str, Any]] | None = None
    layers_name: str = tables.LAYERS  # of layers in files
    # tensors that files have besides
    redundant: tuple[str, ...] = ()  # ends of their names
    # type that models without variants are exported as, where an earlier family computes the same
    written_as: str | None = None
    behind: Behind = NONE  # what files have behind the decoder's layers
    # values of keys that config.json lacks: the defaults of the class in `transformers`
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def table(self, model: ModelConfig) -> Sequence[NameLine]:
        """Return the lines that this model uses."""
        lines = (*self.lines, *self.behind.lines)
        if model.mla is not None and model.mla.q_lora_rank is None:
            return tables.without_query_latent(lines)
        return lines

    def weights(self, model: ModelConfig) -> Iterator[NamedWeight]:
        """Yield the model's tensors that its files hold: weights and router biases."""
        yield from model_weights(model)
        yield from tables.router_biases(model)

    def written(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json of a model, as far as our configuration determines it."""
        found = config.written(model, self.model_type, self.architecture)
        if self.written_moe is not None and model.moe is not None:
            found |= self.written_moe(model.moe)
        layers = config.written_layers(model)
        found |= {key: layers[key] for key in self.layers}
        found = self.behind.counted(found, model)
        return found if self.more is None else {**found, **self.more(model)}
