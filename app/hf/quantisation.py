"""How the weights of a model's files are quantised: quantization_config of its config.json."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.errors import ConfigError
from app.hf.config_keys import COMPRESSED_NEUTRAL, FP8_NEUTRAL
from app.hf.their_config import TheirConfig, shortened

SECTION = "quantization_config"
FP8, COMPRESSED, MXFP4 = "fp8", "compressed-tensors", "mxfp4"  # values of quant_method
READ = f"{FP8}, {COMPRESSED} in FP8 and {MXFP4}"
ORIGINAL = "name the model that it was quantised from, or save it with its weights in 16 bits"
Extent = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
PER_TENSOR: Extent = (None, None)
PER_ROW: Extent = (1, None)
BLOCK_SIZE = "weight_block_size"
USUAL_BLOCK: Extent = (128, 128)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Method of quantization_config, and what shares a scale in FP8 weights: one extent, or those
    of several groups of layers.
    """

    method: str
    extents: tuple[Extent, ...] = ()

    @classmethod
    def read(cls, config: TheirConfig) -> Quantisation | None:
        """Return what config.json says; None without the section. Raises ConfigError."""
        how = config.section(SECTION)
        if not how.values:
            return None
        method = how.need("quant_method")
        if method == FP8:
            for name, values in FP8_NEUTRAL.items():
                how.only(name, *values)
            return cls(FP8, _of_fp8(how))
        if method == COMPRESSED:
            return cls(COMPRESSED, _of_groups(how))
        if method == MXFP4:
            return cls(MXFP4)
        what = f"weights quantised by {shortened(str(method))} are not supported, only {READ}"
        error = config.refusal(what)
        raise ConfigError(error.key, error.value, error.rule, advice=ORIGINAL)


def _of_fp8(how: TheirConfig) -> tuple[Extent, ...]:
    """Return what shares a scale; without the key, what vLLM takes, or else `transformers`."""
    if how.value(BLOCK_SIZE) is not None:
        return (_block(how, BLOCK_SIZE),)
    return (PER_TENSOR,) if BLOCK_SIZE in how.values else (PER_TENSOR, USUAL_BLOCK)


def _block(section: TheirConfig, name: str) -> Extent:
    size = section.need(name)
    if len(size) != 2 or 0 in size:
        raise section.unsupported(name)
    rows, columns = size
    return rows, columns


def _of_groups(how: TheirConfig) -> tuple[Extent, ...]:
    """Return what shares a scale in each group of layers, each kind once."""
    how.need("format")
    how.only("format", *COMPRESSED_NEUTRAL["format"])
    how.only("transform_config", {})
    _inner(how, "sparsity_config").only("format", "dense")
    groups = _inner(how, "config_groups")
    if not groups.values:
        raise how.refusal(f"{how.name('config_groups')} is missing")
    return tuple(dict.fromkeys(_of_group(_inner(groups, name)) for name in groups.values))


def _of_group(group: TheirConfig) -> Extent:
    group.only("format", *COMPRESSED_NEUTRAL["format"])
    weights = _inner(group, "weights")
    for name in ("num_bits", "type"):
        weights.need(name)
    for name, values in COMPRESSED_NEUTRAL.items():
        if name != "format":
            weights.only(name, *values)
    match weights.get("strategy", "tensor"):
        case "tensor":
            return PER_TENSOR
        case "channel":
            return PER_ROW
        case "block":
            return _block(weights, "block_structure")
    raise weights.unsupported("strategy")


def _inner(section: TheirConfig, name: str) -> TheirConfig:
    """Return a section within a section; an empty one if it is missing or null."""
    values = section.get(name, {})
    if not isinstance(values, dict):
        raise section.refusal(f"{section.said(name)} is no section")
    return replace(section, values=values, inside=section.name(name), asked=set(), asked_within={})
