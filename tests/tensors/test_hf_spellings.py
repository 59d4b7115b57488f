"""Tensors and config.json as `transformers` 4 and as version 5 spells them are the same model.

Both are written here by hand, so that no version's own conversions take part.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.hf_folders import FAMILIES, loaded, their_logits
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_spellings import config_of_4
from tests.tensors.hf_weights import spread_weights
from tests.tensors.models import draw_tokens, forward

PER_EXPERT = "{prefix}.mlp.experts.{expert}.{part}_proj.weight"
OF_MIXTRAL = "{prefix}.block_sparse_moe.experts.{expert}.{part}.weight"
MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
OF_GRANITE = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
    "router.weight": "router.layer.weight",
}
MIXTRALS = ("mixtral", "minimax_m2")
STACKED = re.compile(r"(model\.layers\.\d+)\.mlp\.experts\.(gate_up|down)_proj")

Named = Iterator[tuple[str, Tensor]]


def as_version_5(name: str, value: Tensor, family: str) -> Named:
    """All experts of a layer in one tensor, gate and up one below the other."""
    yield name, value


def as_version_4(name: str, value: Tensor, family: str) -> Named:
    """A tensor for each expert, and other names in Mixtral and MiniMax-M2."""
    if family in MIXTRALS and name.endswith((".mlp.gate.weight", ".mlp.e_score_correction_bias")):
        yield name.replace(".mlp.", ".block_sparse_moe."), value
        return
    if family == "gpt_neox":
        name = name.replace("lm_head", "embed_out")
    if family == "granitemoe":
        for new, old in OF_GRANITE.items():
            name = name.replace(new, old)
        yield name, value
        return
    stacked = STACKED.fullmatch(name)
    if stacked is None or family == "gpt_oss":  # one tensor in all versions
        yield name, value
        return
    names = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
    for expert, both in enumerate(value):
        for part, matrix in zip(names, both.chunk(len(names)), strict=True):
            spelling, word = PER_EXPERT, part
            if family in MIXTRALS:
                spelling, word = OF_MIXTRAL, MIXTRAL_PARTS[part]
            yield spelling.format(prefix=stacked[1], expert=expert, part=word), matrix


def write_by_hand(
    folder: Path, model: Any, spell: Callable[[str, Tensor, str], Named], config: dict[str, Any]
) -> set[str]:
    """A folder with these names; returns them."""
    folder.mkdir()
    family = config["model_type"]
    tensors = {
        spelling: part.clone()
        for name, value in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
        for spelling, part in spell(name, value, family)
    }
    if spell is as_version_4:  # what older versions have saved besides
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        head = model.state_dict()["lm_head.weight"].clone()
        tensors |= dict(spell("lm_head.weight", head, family))
        if family == "gpt_neox":
            tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 4, 4).bool()
            tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return set(tensors)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_both_spellings_are_the_same_model(name: str, tmp_path: Path):
    build, theirs, _ = CASES[FAMILIES[name]]()
    model = build(theirs).eval()
    spread_weights(model)
    config = {**theirs.to_dict(), "architectures": [build.__name__]}
    new = write_by_hand(tmp_path / "new", model, as_version_5, config)
    old = write_by_hand(tmp_path / "old", model, as_version_4, config_of_4(dict(config)))
    stacked = {each for each in new if STACKED.fullmatch(each)}
    if name != "gpt_oss":
        assert bool(stacked) == any(".experts.0." in each for each in old) and not stacked & old
    one, other = loaded(tmp_path / "old"), loaded(tmp_path / "new")
    assert dataclasses.replace(one.model, name="new") == other.model
    for key, value in one.state_dict().items():
        assert value.equal(other.state_dict()[key]), key
    tokens = draw_tokens(one.model, 2, 9)
    with torch.no_grad():
        found = forward(one, tokens).x
    torch.testing.assert_close(found, their_logits(model, tokens), atol=1e-4, rtol=1e-4)
