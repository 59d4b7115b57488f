"""Which values of a head rotate, by config.json: as in `transformers`, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.errors import ConfigError
from tests.hf_folders import (
    KEY,
    edit_config,
    loaded,
    save_random,
    their_logits,
    transformers,
)
from tests.tensors.models import draw_tokens, forward

PLAIN = {"rope_type": "default", "rope_theta": 1e3}
PART = "partial_rotary_factor"
READ: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "outside": ("glm4_moe", {"rope_parameters": PLAIN, PART: 0.25}, 4),
    "section first": ("glm4_moe", {"rope_parameters": {**PLAIN, PART: 0.75}, PART: 0.25}, 12),
    "usual": ("glm4_moe", {"rope_parameters": PLAIN}, 8),
    "rotary_dim": ("minimax_m2", {"rope_parameters": PLAIN, "rotary_dim": 4}, 4),
    "before rotary_dim": (
        "minimax_m2",
        {"rope_parameters": PLAIN, "rotary_dim": 4, PART: 0.5},
        8,
    ),
    "whole": ("minimax_m2", {"rope_parameters": PLAIN}, None),
}


@pytest.mark.parametrize("case", READ)
@torch.no_grad()
def test_rotated_width_is_that_of_transformers(case: str, tmp_path: Path):
    name, keys, width = READ[case]
    save_random(name, tmp_path)
    edit_config(tmp_path, **keys)
    chunk = loaded(tmp_path)
    assert chunk.model.rotary_dim == width
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = draw_tokens(chunk.model, 2, 17)
    found, expected = forward(chunk, tokens).x, their_logits(theirs.eval(), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "null": ("glm4_moe", {"rope_parameters": PLAIN, PART: None}, f"{PART} is missing"),
    "odd": (
        "minimax_m2",
        {"rope_parameters": PLAIN, "rotary_dim": 5},
        "as model.rotary_dim=5: rotary positions need an even width",
    ),
    "other family": (
        "mixtral",
        {"rope_parameters": {**PLAIN, PART: 0.5}},
        f"rope_parameters.{PART}=0.5 is not supported",
    ),
    "linear attention": (
        "minimax_m2",
        {"attn_type_list": [1, 0, 1]},
        "attn_type_list has others than 1, softmax attention",
    ),
    "no bias": ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=false is not"),
    "shared": ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not"),
    "norm": ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min=0.1 is not supported"),
    "gate": ("ernie4_5_moe", {"moe_gate": "top2"}, 'moe_gate="top2" is not supported'),
    "bias of the head": ("ernie4_5_moe", {"use_bias": True}, "use_bias=true is not supported"),
    "no experts": ("ernie4_5_moe", {"moe_layer_start_index": 4}, "no layer has experts"),
    "last layer": (
        "ernie4_5_moe",
        {"moe_layer_end_index": [3]},
        "moe_layer_end_index=[3] is not supported",
    ),
    "residual": ("minimax_m2", {"layernorm_mlp_beta": 2.0}, "layernorm_mlp_beta=2.0 is not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_attention_and_experts_are_refused(case: str, tmp_path: Path):
    name, keys, told = REFUSED[case]
    save_random(name, tmp_path)
    edit_config(tmp_path, **keys)
    with pytest.raises(ConfigError) as refused:
        loaded(tmp_path)
    assert refused.value.key == KEY and told in refused.value.rule
