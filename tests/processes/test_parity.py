"""Every layout trains like one process: losses, gradient norms and all parameters after five steps, fp32."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from app.choices import Normalize, Score
from app.config import LossConfig, ModelConfig, ParallelConfig, Run
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.runs import TINY, TINY_MOE, engine_of, make_run, train_steps, whole_parameters

STEPS = 5
SIGMOID = dataclasses.replace(
    TINY_MOE, score=Score.sigmoid, groups=4, topk_groups=2, routed_scale=1.5, shared_gate=True, bias_update_rate=0.0
)
MODELS = {
    "moe": TINY,
    "dense": dataclasses.replace(TINY, moe=None, tie_embeddings=True),
    "sigmoid": dataclasses.replace(TINY, moe=SIGMOID, qk_norm=True),
}
LAYOUTS = {2: [(2, 1), (2, 2)], 4: [(4, 1), (4, 2), (4, 4)]}  # world -> (dp, ep)
CASES = [
    (name, dp, ep) for name, model in MODELS.items() for layouts in LAYOUTS.values() for dp, ep in layouts if ep == 1 or model.moe
]


def run_of(model: ModelConfig, dp: int, ep: int, normalize: Normalize) -> Run:
    return make_run(model, parallel=ParallelConfig(world_size=dp, dp=dp, ep=ep), loss=LossConfig(normalize))


def five_steps(rank: int, run: Run) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    engine = engine_of(run, rank)
    return train_steps(run, engine, STEPS), {name: value.numpy() for name, value in whole_parameters(engine).items()}


@pytest.fixture(scope="module")
def one_process() -> dict[tuple[str, Normalize], Any]:
    runs = {(name, norm): run_of(model, 1, 1, norm) for name, model in MODELS.items() for norm in Normalize}
    return {key: run_distributed(five_steps, 1, run)[0] for key, run in runs.items()}


@pytest.mark.parametrize("normalize", list(Normalize), ids=lambda n: n.value)
@pytest.mark.parametrize(("name", "dp", "ep"), sampled(CASES, 3))
def test_layout_equals_one_process(one_process, name: str, dp: int, ep: int, normalize: Normalize):
    seen, expected = one_process[name, normalize]
    for losses, parameters in run_distributed(five_steps, dp, run_of(MODELS[name], dp, ep, normalize)):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(seen), rtol=2e-5, atol=1e-6)
        assert parameters.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(torch.from_numpy(parameters[key]), torch.from_numpy(value), rtol=1e-4, atol=2e-5, msg=key)


def first_parameters(rank: int, run: Run) -> dict[str, Any]:
    return {name: value.numpy() for name, value in whole_parameters(engine_of(run, rank)).items()}


def test_parameters_do_change(one_process):
    before = run_distributed(first_parameters, 1, run_of(TINY, 1, 1, Normalize.token))[0]
    after = one_process["moe", Normalize.token][1]
    assert all(not np.allclose(before[key], after[key], atol=1e-3) for key in before)
