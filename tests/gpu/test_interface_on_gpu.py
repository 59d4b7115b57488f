"""The Python interface on a GPU: numbers of the command, captured decoding, a caller as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graphfold
from tests.training import corpus_in

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_run_and_its_model_leave_device_and_stream(tmp_path: Path):
    corpus = corpus_in(tmp_path / "corpus")
    words = [*(word for word in corpus if word != "train.device=cpu"), "train.steps=3"]
    stream, state = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    first = graphfold.train([*words, f"run_dir={tmp_path}/a"])
    again = graphfold.train([*words, f"run_dir={tmp_path}/b"])
    assert first.loss == again.loss
    with graphfold.load(first.folder) as model:
        texts = model.generate(["def ", "class "], max_new_tokens=8, temperature=0)
        eager = model.generate(["def ", "class "], max_new_tokens=8, temperature=0, graph="none")
        assert texts == eager and "cuda" in repr(model)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.cuda.get_rng_state(), state)
