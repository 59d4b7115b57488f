"""What a Hugging Face model is, by its config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.config import ModelConfig
from app.errors import ConfigError
from app.hf.config_json import as_model
from app.hf.families import Family, family_named
from app.hf.their_config import TheirConfig


@dataclass(frozen=True, slots=True)
class TheirModel:
    """What a model's config.json says."""

    config: TheirConfig
    family: Family
    model: ModelConfig

    @classmethod
    def read(cls, folder: Path, key: str) -> TheirModel:
        """That of a folder. Raises ConfigError for what our models cannot be."""
        config = TheirConfig.read(folder, key)
        family = family_named(config)
        config = config.completed(family.defaults)
        try:
            model = as_model(family.read(config), folder.resolve().name)
        except ConfigError as error:
            if error.key == key:
                raise
            raise config.refusal(f"as {error}") from None
        return cls(config, family, model)

    @property
    def predicted(self) -> range:
        """Layers behind the last one that predict further tokens, which we do not have."""
        layers = self.model.num_layers
        return range(layers, layers + int(self.config.get("num_nextn_predict_layers", 0)))
