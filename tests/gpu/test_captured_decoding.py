"""Decoding on a GPU: steps replayed from a CUDA graph are those run eagerly, bit for bit; in fp32
they are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from app.choices import Dtype
from app.config import ModelConfig, PrecisionConfig, Run
from app.engine.capture.recorder import CudaRecorder
from app.engine.decoding.decoder import Decoder
from app.engine.ranks.groups import process_world
from tests.gpu.engine import MODELS, engine_on
from tests.runs import make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ([5, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5])
STEPS = 20


@pytest.fixture
def side_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def said(run: Run, device: str, captures: bool = False) -> torch.Tensor:
    """Logits behind the prompts and behind each of the same tokens."""
    with process_world(0, 1, torch.device(device)):
        engine = engine_on(run, device)
        engine.gather_all_params()
        recorder = CudaRecorder() if captures else None
        decoder = Decoder(engine, len(PROMPTS), 32, recorder)
        found = [decoder.prompts(PROMPTS)]
        found += [decoder.step([nth, nth + 7, nth + 9]) for nth in range(STEPS)]
        if recorder is not None:
            assert decoder.eager is None and len(recorder.recordings) == 1
            recorder.release()
        return torch.stack(found).cpu()


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_replayed_steps_are_the_eager_ones(model: ModelConfig, side_stream: None):
    run = make_run(model, precision=PrecisionConfig(Dtype.bfloat16))
    eager = said(run, "cuda:0")
    assert eager.isfinite().all() and said(run, "cuda:0", captures=True).equal(eager)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_fp32_equals_the_cpu(model: ModelConfig, side_stream: None):
    run = make_run(model)
    torch.testing.assert_close(said(run, "cuda:0"), said(run, "cpu"), rtol=1e-3, atol=1e-3)
