"""Rotary positions of the first values of a head (model.rotary_dim)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from app.config import MLAConfig, ModelConfig
from app.errors import ConfigError
from app.model.layers.layers import RotaryTable, rotate, rotate_part
from tests.tensors.models import draw_tokens, forward, make_chunk

MODEL = ModelConfig(hidden_size=32, num_heads=4, num_kv_heads=4, init_std=0.3)


def test_first_values_turn_like_a_narrow_head():
    heads = torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(0))
    model = dataclasses.replace(MODEL, rotary_dim=6)
    table = RotaryTable.of(torch.arange(5)[None], model.rope)
    found = rotate_part(heads, table)
    assert torch.equal(found[..., :6], rotate(heads[..., :6], table))
    assert torch.equal(found[..., 6:], heads[..., 6:])


def test_whole_width_is_the_same_as_none():
    tokens = draw_tokens(MODEL, 2, 9)
    whole, equal, part = (
        forward(make_chunk(dataclasses.replace(MODEL, rotary_dim=width)), tokens).x
        for width in (None, MODEL.head_width, MODEL.head_width - 2)
    )
    assert torch.equal(whole, equal) and not torch.allclose(whole, part)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "wider than a head": (
        {"rotary_dim": 10},
        "10: must be 2 to the width of a head, 8; did you mean 8?",
    ),
    "nothing": ({"rotary_dim": 0}, "0: must be 2 to the width of a head, 8; did you mean 2?"),
    "odd": ({"rotary_dim": 5}, "5: rotary positions need an even width; did you mean 4?"),
    "latent": (
        {"rotary_dim": 4, "mla": MLAConfig()},
        "4: multi-head latent attention rotates model.mla.qk_rope_head_dim values; did you mean "
        "null?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_rotary_dim_is_refused(mistake: str):
    fields, expected = MISTAKES[mistake]
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(MODEL, **fields)
    assert str(refused.value) == f"model.rotary_dim={expected}"
