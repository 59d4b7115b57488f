"""Every layout trains like one process: losses, gradient norms and all parameters after five
steps, fp32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from app.choices import Normalize, Score
from app.config import LossConfig, ModelConfig, ParallelConfig, Run
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.parity import OneProcess, few_steps
from tests.runs import STEADY, TINY, TINY_MOE, engine_of, make_run, whole_parameters

STEPS = 5
SIGMOID = dataclasses.replace(
    TINY_MOE,
    score=Score.sigmoid,
    groups=4,
    topk_groups=2,
    routed_scale=1.5,
    shared_gate=True,
    bias_update_rate=0.0,
)
MODELS = {
    "moe": TINY,
    "dense": dataclasses.replace(TINY, moe=None, tie_embeddings=True),
    "sigmoid": dataclasses.replace(TINY, moe=SIGMOID, qk_norm=True),
}
LAYOUTS = {2: [(2, 1), (2, 2)], 4: [(4, 1), (4, 2), (4, 4)]}  # world -> (dp, ep)
CASES = [
    (name, dp, ep)
    for name, model in MODELS.items()
    for layouts in LAYOUTS.values()
    for dp, ep in layouts
    if ep == 1 or model.moe
]


def run_of(model: ModelConfig, dp: int, ep: int, normalize: Normalize) -> Run:
    return make_run(
        model,
        parallel=ParallelConfig(world_size=dp, dp=dp, ep=ep),
        loss=LossConfig(normalize),
        optim=STEADY,
    )


@functools.cache
def one_process(name: str, normalize: Normalize) -> OneProcess:
    return OneProcess.of(run_of(MODELS[name], 1, 1, normalize=normalize), STEPS)


@pytest.mark.every(4)
@pytest.mark.parametrize("normalize", list(Normalize), ids=lambda n: n.value)
@pytest.mark.parametrize(("name", "dp", "ep"), sampled(CASES, 3))
def test_layout_equals_one_process(name: str, dp: int, ep: int, normalize: Normalize):
    for found in run_distributed(
        few_steps, dp, run_of(MODELS[name], dp, ep, normalize=normalize), STEPS
    ):
        one_process(name, normalize).expect(found)


def first_parameters(rank: int, run: Run) -> dict[str, Any]:
    return {name: value.numpy() for name, value in whole_parameters(engine_of(run, rank)).items()}


def test_parameters_do_change():
    before = run_distributed(first_parameters, 1, run_of(TINY, 1, 1, normalize=Normalize.token))[0]
    after = one_process("moe", Normalize.token).plain["parameters"]
    assert all(not np.allclose(before[key], after[key], atol=1e-3) for key in before)
