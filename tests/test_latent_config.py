"""Mistakes in `model.mla`, `model.yarn` and groups of experts name their key and what works."""

from __future__ import annotations

import pytest

from app.errors import ConfigError
from tests.config import load

LATENT = "model=deepseek_v2_lite"


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("mistake", "nearest"),
    [
        ("model.num_kv_heads=4", "model.num_kv_heads=16"),
        ("model.qk_norm=true", "model.qk_norm=false"),
        ("model.head_dim=64", "model.head_dim=null"),
        ("model.mla.v_head_dim=200", "model.mla.v_head_dim=192"),
        ("model.mla.qk_rope_head_dim=63", "model.mla.qk_rope_head_dim=64"),
        ("model.mla.kv_lora_rank=0", "model.mla.kv_lora_rank=1"),
        ("model.mla.kv_lora_rank=9999999", "model.mla.kv_lora_rank=1048576"),
        ("model.yarn.beta_fast=0.5", "model.yarn.beta_fast=2.0"),
        ("model.yarn.factor=0.5", "model.yarn.factor=1"),
        ("model.moe.group_best=2", "model.moe.group_best=null"),
    ],
)
def test_a_mistake_names_its_key_and_what_works(mistake: str, nearest: str):
    key, value = nearest.split("=")
    with pytest.raises(ConfigError) as refused:
        load(LATENT, mistake)
    assert refused.value.key == key and f"did you mean {value}?" in str(refused.value)
    load(LATENT, nearest)


def test_a_group_has_as_many_best_experts_as_experts():
    groups = ("model.moe.groups=32", "model.moe.topk_groups=3")
    with pytest.raises(ConfigError, match="did you mean 2"):
        load(LATENT, *groups, "model.moe.group_best=3")
    assert load(LATENT, *groups, "model.moe.group_best=1").model.moe.group_best == 1


def test_null_sections_take_single_keys():
    model = load(LATENT, "model.mla.q_lora_rank=96", "model.yarn.factor=8").model
    assert (model.mla.q_lora_rank, model.mla.kv_lora_rank) == (96, 512)
    assert (model.yarn.factor, model.yarn.mscale) == (8, 0.707)
    assert load(LATENT, "model.yarn=null").model.softmax_scale is None
