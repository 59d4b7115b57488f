"""Kinds of attention by layer: patterns, and mistakes with advice that works."""

from __future__ import annotations

from typing import Any

import pytest

from app.choices import LayerType
from app.config import ModelConfig
from app.errors import ConfigError
from tests.config import load

FULL, SLIDING, _ = LayerType


def windows(**keys: Any) -> list[int | None]:
    model = ModelConfig(num_layers=5, **keys)
    return [spec.attention.window for spec in model.layer_specs]


def test_a_pattern_repeats_over_the_layers():
    assert windows() == windows(layer_types=[FULL]) == [None] * 5
    assert windows(sliding_window=8) == windows(sliding_window=8, layer_types=[SLIDING]) == [8] * 5
    pattern = (SLIDING, SLIDING, FULL)
    assert windows(sliding_window=8, layer_types=pattern) == [8, 8, None, 8, 8]


def test_layers_without_positions_follow_a_pattern():
    model = ModelConfig(num_layers=5, no_rope_layers=(1, 0))
    ropes = [spec.attention.rope for spec in model.layer_specs]
    assert ropes == [model.rope, None, model.rope, None, model.rope]


def test_layers_of_a_kind_are_one_value():
    model = ModelConfig(num_layers=5, sliding_window=8, layer_types=(SLIDING, FULL))
    first, second, *others = model.layer_specs
    assert first != second and [spec is first for spec in others] == [True, False, True]


def test_words_of_an_override():
    run = load("model.layer_types=[sliding_attention,full_attention]", "model.sliding_window=8")
    assert run.model.layer_types == (SLIDING, FULL) and run.model.sliding_window == 8


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.layer_types", ["num_layers=2", "layer_types=[full_attention,full_attention,"
            "sliding_attention]", "sliding_window=4"]),
        ("model.sliding_window", ["layer_types=[full_attention,sliding_attention]"]),
        ("model.layer_types", ["layer_types=[full_attention]", "sliding_window=4"]),
        ("model.sliding_window", ["sliding_window=0"]),
        ("model.no_rope_layers", ["no_rope_layers=[1,2]"]),
        ("model.no_rope_layers", ["no_rope_layers=[1,1,0]", "num_layers=2"]),
        ("model.no_rope_layers", ["model=deepseek_v2_lite", "no_rope_layers=[1,0]"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_and_its_advice_works(key: str, words: list[str]):
    words = [word if word.startswith("model=") else f"model.{word}" for word in words]
    with pytest.raises(ConfigError) as refused:
        load(*words)
    error = refused.value
    assert error.key == key and error.alternatives
    for alternative in error.alternatives:
        load(*words, *error.override(alternative.candidates[0]))
