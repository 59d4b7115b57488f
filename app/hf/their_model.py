"""Architecture of a Hugging Face model, read from its config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.config import ModelConfig
from app.errors import ConfigError, typed
from app.hf.behind import COUNTS
from app.hf.config_json import as_model
from app.hf.config_keys import check_neutral, left_out
from app.hf.families import family_named
from app.hf.family import Family
from app.hf.quantisation import Quantisation
from app.hf.their_config import TheirConfig


@dataclass(frozen=True, slots=True)
class TheirModel:
    """Family and configuration of a Hugging Face model."""

    config: TheirConfig
    family: Family
    model: ModelConfig
    quantised: Quantisation | None  # None: every tensor is what its type says
    behind: range  # layers behind the decoder's
    left_out: tuple[str, ...]  # phrases on what is ignored in config.json

    @classmethod
    def read(cls, folder: Path, key: str) -> TheirModel:
        """Read a folder's config.json. Raises ConfigError for an unsupported model."""
        said = TheirConfig.read(folder, key)
        family = family_named(said)
        config = said.completed(family.defaults)
        fields = family.read(config)
        quantised = Quantisation.read(config)
        behind = _behind(said, family, fields["num_layers"])
        check_neutral(config)
        try:
            model = as_model(fields, folder.resolve().name)
        except ConfigError as error:
            # sizes are given by the weights, so an error must not suggest others
            told = f"{error.key}={typed(error.value)}: {error.rule}"
            raise config.refusal(f"as {told}") from None
        phrases = tuple(left_out(config, family.model_type))
        return cls(config, family, model, quantised, behind=behind, left_out=phrases)


def _behind(said: TheirConfig, family: Family, layers: int) -> range:
    """Return the layers behind the decoder's, whose number `said` may have under either name."""
    there = any(said.values.get(name) is not None for name in COUNTS)
    more = said.either(*COUNTS) if there else family.behind.usual
    return range(layers, layers + int(more))
