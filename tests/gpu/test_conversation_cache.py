"""A conversation on a GPU: cached and captured, it is answered as one that is computed anew."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from app.choices import Dtype
from app.config import ModelConfig, PrecisionConfig, Run
from app.engine.capture.recorder import CudaRecorder
from app.engine.decoding import conversation
from app.engine.decoding.conversation import CachedText
from app.engine.decoding.decoder import Decoder
from app.engine.decoding.drawing import Sampling
from app.engine.ranks.groups import process_world
from tests.gpu.engine import MODELS, engine_on
from tests.runs import make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QUESTIONS = ([5, 1, 4, 1, 5], [9, 2, 6], [5], [3, 5, 8, 9])
ANSWER = 4  # tokens


@pytest.fixture
def side_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def said(run: Run, device: str, *, captures: bool, most_new: int) -> list[int]:
    """All tokens of a conversation; `most_new` 0 computes every turn anew."""
    conversation.MOST_NEW = most_new
    with process_world(0, 1, torch.device(device)):
        engine = engine_on(run, device)
        engine.gather_all_params()
        recorder = CudaRecorder() if captures else None
        text = CachedText(Decoder(engine, 1, 48, recorder), run.model.vocab_size)
        generator, found = torch.Generator().manual_seed(1), []
        for question in QUESTIONS:
            found += question
            drawn = text.draw(found, ANSWER, Sampling(temperature=0.0), generator=generator)
            found += islice(drawn, ANSWER)
        if recorder is not None:
            # experts in fp32 wait for the host
            assert recorder.recordings or run.model.moe is not None, "nothing was captured"
            recorder.release()
        return found


@pytest.fixture(autouse=True)
def the_same_limit() -> Iterator[None]:
    most = conversation.MOST_NEW
    yield
    conversation.MOST_NEW = most


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_answers_are_those_computed_anew_and_the_cpus(model: ModelConfig, side_stream: None):
    run = make_run(model)
    anew = said(run, "cuda:0", captures=False, most_new=0)
    assert said(run, "cuda:0", captures=True, most_new=64) == anew
    assert said(run, "cpu", captures=False, most_new=64) == anew


@pytest.mark.parametrize("name", ["moe", "latent"])
def test_captured_answers_in_bf16_are_the_eager_ones(name: str, side_stream: None):
    run = make_run(MODELS[name], precision=PrecisionConfig(Dtype.bfloat16))
    eager = said(run, "cuda:0", captures=False, most_new=64)
    assert said(run, "cuda:0", captures=True, most_new=64) == eager
