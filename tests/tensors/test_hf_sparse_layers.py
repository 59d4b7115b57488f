"""Layers with experts are those of `transformers`, for any decoder_sparse_step and mlp_only_layers,
and written back as the same layers.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from app.config import ModelConfig
from app.errors import ConfigError
from app.hf.config_json import as_model
from app.hf.families import family_of
from app.hf.supported import FAMILIES
from app.hf.their_config import NOWHERE, TheirConfig
from tests.tensors.hf_parity import CASES

LAYERS = 4
SUBSETS = [kept for count in range(LAYERS + 1) for kept in combinations(range(LAYERS), count)]
KINDS = {"qwen3_moe": "qwen3-moe", "qwen2_moe": "qwen2-moe-shared-gate"}


def read(kind: str, values: dict[str, Any]) -> ModelConfig:
    (family,) = (family for family in FAMILIES if family.model_type == kind)
    return as_model(family.read(TheirConfig(values, NOWHERE, "test")), "test")


def layers_of(model: ModelConfig) -> list[bool]:
    return [model.is_moe_layer(layer) for layer in range(LAYERS)]


@pytest.mark.every(4)
@pytest.mark.parametrize("step", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_experts_are_those_of_transformers(kind: str, step: int):
    build, theirs, _ = CASES[KINDS[kind]]()
    values = {**theirs.to_dict(), "num_hidden_layers": LAYERS, "layer_types": None}
    for kept in SUBSETS:
        values |= {"decoder_sparse_step": step, "mlp_only_layers": list(kept)}
        with torch.device("meta"):
            hf = build(type(theirs).from_dict(dict(values)))
        expected = [hasattr(layer.mlp, "experts") for layer in hf.model.layers]
        if not any(expected):
            with pytest.raises(ConfigError):
                read(kind, values)
            continue
        model = read(kind, values)
        assert layers_of(model) == expected, kept
        again = family_of(model, "test", kept)
        assert again.model_type == kind
        assert layers_of(read(kind, {**values, **again.written(model)})) == expected, kept


def test_a_step_of_none_is_refused():
    values = {**CASES["qwen3-moe"]()[1].to_dict(), "decoder_sparse_step": 0}
    with pytest.raises(ConfigError):
        read("qwen3_moe", values)
