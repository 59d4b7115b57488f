"""How many functions of the program the host calls per layer: where the device is faster than the
host, an eager step waits for them. They are counted, as times differ from run to run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

import app
from app.choices import Dtype
from app.config import ModelConfig, PrecisionConfig
from app.engine.step.step import TrainingStep
from app.kernels.tiling import cdiv
from tests.distributed import run_distributed
from tests.runs import TINY, TINY_MOE, batches_of, engine_of, make_run

PROGRAM = Path(app.__file__).parent
DENSE = dataclasses.replace(TINY, moe=None)
EXPERTS = dataclasses.replace(TINY, moe=dataclasses.replace(TINY_MOE, first_k_dense=0))
# Of one microbatch through one layer and back. 100 more take about 10 µs: 1 ms of a step of 24
# layers and 4 microbatches.
MOST = {"dense": (DENSE, 111), "experts": (EXPERTS, 265)}


def calls_of(action: Callable[[], object]) -> int:
    """Calls of the program's functions, with each resumption of a generator."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(str(PROGRAM))

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def calls_per_layer(rank: int, model: ModelConfig) -> float:
    """Return the host calls that one more layer adds per microbatch."""
    found = []
    for layers in (1, 2):
        longer = dataclasses.replace(model, num_layers=layers)
        run = make_run(longer, precision=PrecisionConfig(Dtype.bfloat16))
        step = TrainingStep(engine_of(run, rank))
        batches = batches_of(run, 0, 0)
        step(batches, 1e-3, 0.0)
        found.append(calls_of(partial(step, batches, 1e-3, 0.0)))
    return (found[1] - found[0]) / run.num_microbatches


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", MOST)
def test_a_layer_calls_few_functions(kind: str):
    model, most = MOST[kind]
    [calls] = run_distributed(calls_per_layer, 1, model)
    assert most / 2 < calls <= most


def test_grids_of_kernels_are_computed_without_triton():
    """Its `cdiv` takes 2 µs on the host, as much as a small operation."""
    assert [cdiv(count, 4) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    files = (PROGRAM / "kernels").glob("*.py")
    assert [path.name for path in files if "triton.cdiv(" in path.read_text()] == []
