"""A model of each family that began here is written as one that `transformers` loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.choices import Score
from app.config import ModelConfig
from app.hf.families import family_of
from app.hf.file_names import CONFIG_JSON
from app.hf.write import Export, as_json
from tests.hf_folders import FAMILIES, transformers
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import Held, spread_weights
from tests.tensors.models import draw_tokens, forward, make_chunk


@pytest.mark.every(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_what_we_write(name: str, tmp_path: Path):
    check_written(CASES[FAMILIES[name]]()[2], tmp_path)


@pytest.mark.every(12)
@pytest.mark.parametrize("name", [name for name in FAMILIES if "-" not in name])
def test_embeddings_are_written_tied_or_not(name: str, tmp_path: Path):
    """As the family's case is not."""
    _, _, model = CASES[FAMILIES[name]]()
    check_written(replace(model, tie_embeddings=not model.tie_embeddings), tmp_path)


@torch.no_grad()
def check_written(model: ModelConfig, tmp_path: Path) -> None:
    """`transformers` loads it with the config.json that we make up: all tensors used, none missing,
    the same logits, and the same greedy text.
    """
    chunk = make_chunk(model)
    spread_weights(chunk)
    held = Held(chunk)
    if model.moe is not None and model.moe.score is Score.sigmoid:
        for bias_E in held.biases.values():
            bias_E.uniform_(-0.2, 0.2, generator=torch.Generator().manual_seed(1))
    family = family_of(model, "test", tmp_path)
    export = Export(model, family, tmp_path / "out", torch.float32)
    export.begin()
    for file in export.files():
        export.write(file, held)
    config = {**family.written(model), "max_position_embeddings": 64}
    export.finish({CONFIG_JSON: as_json(config)})
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()), info
    assert type(theirs).__name__ == family.architecture
    tokens = draw_tokens(model, 2, 9)
    ours, expected = forward(chunk, tokens).x, theirs.eval()(tokens, use_cache=False).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    text = tokens[:1]
    for _ in range(6):
        text = torch.cat((text, forward(chunk, text).x[:, -1:].argmax(-1)), dim=1)
    given = {"attention_mask": torch.ones_like(tokens[:1]), "pad_token_id": 0, "eos_token_id": -1}
    greedy = theirs.generate(tokens[:1], max_new_tokens=6, do_sample=False, **given)
    assert greedy.tolist() == text.tolist()
