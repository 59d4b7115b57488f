"""A loss scale multiplies every loss that backward starts from: the tokens' and the routers'."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from app.config import ParallelConfig, PrecisionConfig, Run
from tests.distributed import run_distributed
from tests.runs import TINY, TINY_MOE, engine_of, make_run, train_steps, whole_gradients

SCALE = 1024.0  # a power of two: in fp32 it changes no bit of a gradient but its exponent
# Enough of the routers' losses to tell.
HEAVY = dataclasses.replace(TINY_MOE, first_k_dense=0, aux_loss_coeff=0.5, z_loss_coeff=0.1)
Gradients = dict[str, np.ndarray]


def gradients(rank: int, runs: tuple[Run, ...]) -> list[Gradients]:
    """The gradients of one step of each run, divided by its scale."""
    found = []
    for run in runs:
        engine = engine_of(run, rank)
        train_steps(run, engine, 1)
        found.append({name: grad.numpy() for name, grad in whole_gradients(engine).items()})
    return found


@pytest.mark.parametrize("pp", [1, 2])
def test_a_scale_changes_no_gradient(pp: int):
    model, parallel = dataclasses.replace(TINY, num_layers=2, moe=HEAVY), ParallelConfig(pp=pp)
    precisions = (PrecisionConfig(), PrecisionConfig(loss_scale=SCALE))
    runs = tuple(
        make_run(model, parallel=parallel, precision=precision) for precision in precisions
    )
    plain, scaled = run_distributed(gradients, pp, runs)[0]
    assert sum(name.endswith("router.weight") for name in plain) == model.num_layers
    for name, grad in plain.items():
        assert grad.any() and np.array_equal(grad, scaled[name]), name
