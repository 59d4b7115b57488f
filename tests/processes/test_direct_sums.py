"""Gradients of weights that go straight into their sums are those that autograd would have
added.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from app.choices import Dtype
from app.config import OptimConfig, ParallelConfig, PrecisionConfig, Run
from app.optim.distributed import DistributedOptimizer
from tests.cases import sampled
from tests.distributed import run_distributed
from tests.forks import Patches
from tests.runs import TINY, engine_of, make_run, train_steps, whole_gradients

MOE = dataclasses.replace(TINY, num_layers=4)
DENSE = dataclasses.replace(MOE, moe=None)
LAYOUTS = {"dp2": ParallelConfig(dp=2), "tp2": ParallelConfig(tp=2), "pp2": ParallelConfig(pp=2)}
MODELS = {"moe": MOE, "dense": DENSE, "tied": dataclasses.replace(DENSE, tie_embeddings=True)}


def trained(rank: int, run: Run) -> list[dict[str, Any]]:
    """Losses and gradients with direct sums and without."""
    found = []
    for direct in (True, False):
        with Patches.context() as patch:
            if not direct:
                patch.setattr(DistributedOptimizer, "main_grad_sink", lambda optimizer: None)
            engine = engine_of(run, rank)
            assert (engine.optimizer.main_grad_sink() is not None) == direct
            seen = train_steps(run, engine, 3)
            found.append(
                {
                    "seen": seen,
                    **{name: grad.numpy() for name, grad in whole_gradients(engine).items()},
                }
            )
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", sampled(MODELS, 3))
def test_the_same_bits_as_autograd(model: str, parallel: ParallelConfig):
    sections = {"precision": PrecisionConfig(Dtype.bfloat16), "parallel": parallel}
    run = make_run(MODELS[model], optim=OptimConfig(lr=1e-2, bucket_numel=1500), **sections)
    for direct, plain in run_distributed(trained, 2, run):
        assert direct.pop("seen") == plain.pop("seen")
        for name, grad in plain.items():
            assert torch.equal(torch.from_numpy(direct[name]), torch.from_numpy(grad)), name


def test_gradients_in_weight_dtype_use_autograd():
    def alone(rank: int) -> bool:
        return engine_of(make_run(TINY), rank).optimizer.main_grad_sink() is None

    assert run_distributed(alone, 1) == [True]
