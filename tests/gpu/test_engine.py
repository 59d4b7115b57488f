"""The engine on a GPU: like the CPU in fp32, bit for bit like itself in bf16, and one host wait
per step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from app.choices import Dtype
from app.config import ModelConfig, PrecisionConfig, Run
from app.engine.ranks.groups import process_world
from app.engine.step.step import TrainingStep
from tests.gpu.engine import MODELS, engine_on
from tests.runs import batches_of, make_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def side_stream() -> Iterator[None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def losses(run: Run, device: str, steps: int = 5) -> list[float]:
    """Loss and gradient norm of each step, from the same initial weights."""
    seen = []
    with process_world(0, 1, torch.device(device)):
        engine = engine_on(run, device)
        step = TrainingStep(engine)
        for n in range(steps):
            facts, _ = step(batches_of(run, n, 0), run.optim.lr, run.optim.weight_decay)
            seen += [facts.loss, facts.grad_norm]
    return seen


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_fp32_equals_the_cpu(model: ModelConfig, side_stream: None):
    run = make_run(model)
    assert losses(run, "cuda:0") == pytest.approx(losses(run, "cpu"), rel=1e-4)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_bf16_repeats_bit_for_bit(model: ModelConfig, side_stream: None):
    run = make_run(model, precision=PrecisionConfig(Dtype.bfloat16))
    assert losses(run, "cuda:0") == losses(run, "cuda:0")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_host_wait_per_step(model: ModelConfig, side_stream: None):
    run = make_run(model, precision=PrecisionConfig(Dtype.bfloat16))
    with process_world(0, 1, torch.device("cuda:0")):
        step = TrainingStep(engine_on(run, "cuda:0"))
        step(batches_of(run, 0, 0), run.optim.lr, 0.1)
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # warns of itself
            try:
                step(batches_of(run, 1, 0), run.optim.lr, 0.1)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in waits if "called a synchronizing" in str(w.message)]) == 1
