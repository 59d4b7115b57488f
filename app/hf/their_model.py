"""Architecture of a Hugging Face model, read from its config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.config import ModelConfig
from app.errors import ConfigError, typed
from app.hf.config_json import as_model
from app.hf.config_keys import FP8_NEUTRAL, check_neutral, left_out
from app.hf.families import Family, family_named
from app.hf.their_config import TheirConfig, shortened

PREDICT_LAYERS = "num_nextn_predict_layers", "num_mtp_layers"  # one number under two names


@dataclass(frozen=True, slots=True)
class TheirModel:
    """Family and configuration of a Hugging Face model."""

    config: TheirConfig
    family: Family
    model: ModelConfig
    fp8_block: tuple[int, int] | None  # rows and columns per scale; None without FP8 weights
    predicted: range  # layers after the last one, for multi-token prediction
    left_out: tuple[str, ...]  # phrases on what is ignored in config.json

    @classmethod
    def read(cls, folder: Path, key: str) -> TheirModel:
        """Read a folder's config.json. Raises ConfigError for an unsupported model."""
        said = TheirConfig.read(folder, key)
        family = family_named(said)
        config = said.completed(family.defaults)
        fields = family.read(config)
        fp8_block = _fp8_block(config)
        predicted = _predicted(said, family, fields["num_layers"])
        check_neutral(config)
        try:
            model = as_model(fields, folder.resolve().name)
        except ConfigError as error:
            # sizes are given by the weights, so an error must not suggest others
            told = f"{error.key}={typed(error.value)}: {error.rule}"
            raise config.refusal(f"as {told}") from None
        phrases = tuple(left_out(config, family.model_type))
        return cls(config, family, model, fp8_block, predicted=predicted, left_out=phrases)


def _predicted(said: TheirConfig, family: Family, layers: int) -> range:
    """Return the multi-token prediction layers. `said` is config.json without defaults, because
    the number may be given under either name.
    """
    usual = family.defaults.get(PREDICT_LAYERS[0], 0)
    there = any(said.values.get(name) is not None for name in PREDICT_LAYERS)
    more = said.either(*PREDICT_LAYERS) if there else usual
    return range(layers, layers + int(more))


def _fp8_block(config: TheirConfig) -> tuple[int, int] | None:
    how = config.section("quantization_config")
    if not how.values:
        return None
    method = how.need("quant_method")
    if method != "fp8":
        what = (
            f"weights quantised by {shortened(str(method))} are not supported, only fp8 by blocks"
        )
        raise config.refusal(what)
    for name, values in FP8_NEUTRAL.items():
        how.only(name, *values)
    size = how.need("weight_block_size")
    if len(size) != 2 or 0 in size:
        raise how.unsupported("weight_block_size")
    rows, columns = size
    return rows, columns
