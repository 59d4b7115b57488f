"""Positions that depend on the length of a sequence (LongRoPE, dynamic scaling) are those of
`transformers` below and above the original length.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from app.config import DynamicRopeConfig, LongRopeConfig, ModelConfig
from app.config.attention import Rope
from app.errors import ConfigError
from app.model.layers.layers import RotaryTable
from tests.rounding import expect_alike, plain_and_exact
from tests.tensors.hf_parity import FACTORS, dense
from tests.tensors.hf_weights import converted, copy_weights, spread_weights
from tests.tensors.models import draw_tokens, forward, make_chunk

ORIGINAL = 16
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {"longrope": FACTORS},
    "dynamic": {"dynamic": 2.0},
}


@pytest.mark.parametrize("length", [9, ORIGINAL, ORIGINAL + 1, 40])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_equal_transformers(kind: str, length: int):
    build, theirs, ours = dense(
        "Llama", 4, 2, width=16, tied=False, theta=1e2, original=ORIGINAL, **KINDS[kind]
    )
    hf, chunk = build(theirs).eval(), make_chunk(ours)
    spread_weights(hf)
    copy_weights(converted(hf.state_dict(), ours), chunk)
    tokens = draw_tokens(ours, 2, length)
    plain, exact = plain_and_exact(
        lambda model: [model(input_ids=tokens, use_cache=False).logits], hf
    )
    found = forward(chunk, tokens).x
    expect_alike({"0": found}, plain, exact)
    chunk.rope_length = ORIGINAL  # of a run, which counts before the length of these
    assert torch.equal(forward(chunk, tokens).x, found) == (length <= ORIGINAL)


def test_growth_of_heads_is_that_of_the_paper():
    scaling = LongRopeConfig(4096, factor=32.0)
    assert scaling.growth_of_heads == math.sqrt(1 + math.log(32) / math.log(4096))
    assert LongRopeConfig(4096, factor=1.0).growth_of_heads == 1
    assert LongRopeConfig(4096, attention_factor=1.5).growth_of_heads == 1.5


def test_only_the_first_table_copies_factors_from_the_host(monkeypatch: pytest.MonkeyPatch):
    """CUDA graphs, which record later ones, cannot."""
    rope, positions_BS = Rope(16, 1e4, longrope=LongRopeConfig(**FACTORS)), torch.arange(40)[None]
    first = RotaryTable.of(positions_BS, rope, 40)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(RotaryTable.of(positions_BS, rope, 40).cos_BS1H, first.cos_BS1H)


MODEL = ModelConfig(hidden_size=32, num_heads=4, num_kv_heads=4)
MISTAKES: dict[str, tuple[Any, str]] = {
    "factors of other heads": (
        lambda: dataclasses.replace(MODEL, longrope=LongRopeConfig(long_factors=(1.0, 2.0))),
        "model.longrope.long_factors=[1.0, 2.0]: has 2 factors, and heads have 4 pairs of rotated "
        "values; did you mean []?",
    ),
    "a factor of nothing": (
        lambda: LongRopeConfig(short_factors=(0.0,)),
        "model.longrope.short_factors=[0.0]: has others than finite numbers above 0; did "
        "you mean []?",
    ),
    "two scalings": (
        lambda: dataclasses.replace(
            MODEL, longrope=LongRopeConfig(), dynamic_rope=DynamicRopeConfig()
        ),
        "model.dynamic_rope={…}: cannot be combined with model.longrope: both scale the rotary "
        "frequencies; did you mean null?",
    ),
    "linear besides": (
        lambda: dataclasses.replace(
            MODEL, dynamic_rope=DynamicRopeConfig(), linear_rope_factor=2.0
        ),
        "model.linear_rope_factor=2.0: cannot be combined with model.dynamic_rope: both scale the "
        "rotary frequencies; did you mean 1.0?",
    ),
    "one pair": (
        lambda: dataclasses.replace(MODEL, head_dim=2, dynamic_rope=DynamicRopeConfig()),
        "model.dynamic_rope={…}: needs more than one pair of rotated values in a head; did "
        "you mean null?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(mistake: str):
    make, expected = MISTAKES[mistake]
    with pytest.raises(ConfigError) as refused:
        make()
    assert str(refused.value) == expected
