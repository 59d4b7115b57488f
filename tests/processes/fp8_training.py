"""Shared by test_fp8_training.py and other tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from app.choices import (
    GraphImpl,
    GraphKey,
    GraphScope,
)
from app.config import (
    CudaGraphConfig,
    Run,
)
from app.engine.step.step import TrainingStep
from tests.parity import exactly
from tests.runs import batches_of, engine_of, fp8_of, train_steps, whole_gradients
from tests.training import train_rank

STEPS, WARMUP = 4, 1  # eager, captured, replayed twice more


def trained(rank: int, run: Run) -> dict[str, Any]:
    """Losses and norms of some steps, the last gradients, and how often weights are quantised."""
    engine = engine_of(run, rank)
    seen = train_steps(run, engine, STEPS)
    grads = whole_gradients(engine)
    times = {linear.times for linear in fp8_of(engine).linears.values()}
    engine.release()
    return {
        "losses": [loss for loss, _ in seen],
        "grads": {name: grad.numpy() for name, grad in grads.items()},
        "times": times,
    }


def several(rank: int, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, run) for name, run in runs.items()}


def expect_same(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert found["losses"] == expected["losses"], case
    unlike = [
        name for name, grad in expected["grads"].items() if (found["grads"][name] != grad).any()
    ]
    assert not unlike, case


def distance(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """Return the relative distance, over all gradients together, from the exact ones."""
    pairs = [(found["grads"][name], exact["grads"][name]) for name in exact["grads"]]
    apart = sum(float(np.square(mine - wanted).sum()) for mine, wanted in pairs)
    return (apart / sum(float(np.square(wanted).sum()) for _, wanted in pairs)) ** 0.5


def first_step(rank: int, run: Run) -> dict[str, Any]:
    engine = engine_of(run, rank)
    losses = [loss for loss, _ in train_steps(run, engine, 1)]
    return {
        "losses": losses,
        "grads": {name: grad.numpy() for name, grad in whole_gradients(engine).items()},
    }


def exact_step(rank: int, run: Run) -> dict[str, Any]:
    return exactly(rank, run, lambda engine: first_results(run, engine))


def first_results(run: Run, engine: Any) -> dict[str, Any]:
    losses = [loss for loss, _ in train_steps(run, engine, 1)]
    return {
        "losses": losses,
        "grads": {name: grad.numpy() for name, grad in whole_gradients(engine).items()},
    }


def captured(impl: GraphImpl, *scope: GraphScope, key: GraphKey = GraphKey.microbatch) -> Any:
    return CudaGraphConfig(impl, scope, WARMUP, key)


def overfitted(rank: int, run: Run) -> list[float]:
    """Losses of steps on one batch."""
    engine = engine_of(run, rank)
    step = TrainingStep(engine)
    batches = batches_of(run, 0, 0)
    return [step(batches, 1e-2, 0.0)[0].loss for _ in range(30)]


def stopped_and_resumed(rank: int, runs: list[Run]) -> None:
    for run in runs:
        assert train_rank(rank, run, {})[0]
