"""Language models within models of text and images: read alone, exported alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.export.export import export_checkpoint
from app.errors import ConfigError
from app.hf.file_names import CONFIG_JSON
from app.hf.pretrained import Pretrained
from app.hf.wrapped import OF_IMAGES, SECTION
from tests.distributed import run_distributed
from tests.hf_folders import KEY, edit_config, loaded, their_logits, transformers
from tests.processes.hf_export import saved
from tests.processes.init_from import run_from
from tests.rounding import expect_alike, plain_and_exact
from tests.tensors.hf_parity import CASES
from tests.tensors.hf_weights import spread_weights
from tests.tensors.models import draw_tokens, forward

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
WHOLE = {
    "qwen3-5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3-5-moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
}


def save_whole(case: str, folder: Path) -> Any:
    """Save a random model of text and images; returns it."""
    config, kind = (getattr(transformers, name) for name in WHOLE[case])
    _, text, _ = CASES[case]()
    whole = config(text_config=text.to_dict(), vision_config=VISION, image_token_id=90)
    model = kind(whole).eval()
    spread_weights(model)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def test_a_language_model_among_images_is_read(tmp_path: Path):
    theirs = save_whole("qwen3-5", tmp_path)
    chunk = loaded(tmp_path)
    tokens = draw_tokens(chunk.model, 2, 17) % 80  # none stands for an image
    expected = their_logits(theirs, tokens)
    torch.testing.assert_close(forward(chunk, tokens).x, expected, atol=1e-4, rtol=1e-4)
    assert str(Pretrained(tmp_path, KEY).left_out()).startswith(
        "left out: model.visual.*, which reads images; config.json: "
    )


@torch.no_grad()
def test_an_export_is_the_language_model_alone(tmp_path: Path):
    theirs = save_whole("qwen3-5-moe", tmp_path / "theirs")
    run = run_from(tmp_path / "theirs", {})
    (checkpoint,) = run_distributed(saved, 1, run, tmp_path / "run")
    export_checkpoint(Path(checkpoint), tmp_path / "out", "to-hf")
    config = json.loads((tmp_path / "out" / CONFIG_JSON).read_text())
    assert (config["model_type"], config["architectures"]) == (
        "qwen3_5_moe_text",
        ["Qwen3_5MoeForCausalLM"],
    )
    assert not config.keys() & {*OF_IMAGES, SECTION}
    alone, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = draw_tokens(run.model, 2, 17) % 80
    plain, exact = plain_and_exact(lambda model: [their_logits(model, tokens)], theirs)
    expect_alike({"0": their_logits(alone.eval(), tokens)}, plain, exact)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text_config": None}, "models of type qwen3_5 are not supported"),
        ({"model_type": "qwen3_6"}, "models of type qwen3_6 are not supported"),
    ],
    ids=["no section", "another type"],
)
def test_others_with_images_are_refused(changes: dict[str, Any], told: str, tmp_path: Path):
    save_whole("qwen3-5", tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=told):
        loaded(tmp_path)
