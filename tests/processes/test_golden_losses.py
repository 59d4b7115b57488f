"""Losses of five steps as they have been, in fp64.

A change that moves them must say so by changing tests/golden/losses_*.txt.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from app.choices import Score
from app.config import ModelConfig
from app.engine.step.step import TrainingStep
from tests.distributed import run_distributed
from tests.parity import OneProcess
from tests.rounding import SPREAD, expect_sums
from tests.runs import STEADY, TINY, TINY_MOE, batches_of, engine_of, make_run

GOLDEN = Path(__file__).parent.parent / "golden"
BIASED = dataclasses.replace(
    TINY, moe=dataclasses.replace(TINY_MOE, score=Score.sigmoid, bias_update_rate=0.01)
)
MODELS = {"moe": TINY, "dense": dataclasses.replace(TINY, moe=None), "biased": BIASED}


@pytest.mark.parametrize("name", MODELS)
def test_losses_are_what_they_were(name: str):
    """In fp64 as far as the initial weights are the same everywhere: they are drawn in fp32."""
    golden = [float(line) for line in (GOLDEN / f"losses_{name}.txt").read_text().split()]
    expected, found = (
        dict(enumerate(golden, start=1)),
        OneProcess.of(make_run(MODELS[name], optim=STEADY), len(golden)),
    )
    expect_sums(found.exact["losses"], expected, terms=1)
    expect_sums(found.plain["losses"], expected, terms=SPREAD)


def biases_around_a_skipped_step(rank: int, model: ModelConfig) -> list[torch.Tensor]:
    run = make_run(model)
    engine = engine_of(run, rank)
    step, seen = TrainingStep(engine), []
    for poison in (0.0, float("nan"), 0.0):
        engine.chunks[0].norm.weight.data[0] += poison
        step(batches_of(run, 0, 0), run.optim.lr, 0.1)
        seen.append(torch.stack([router.bias_E.clone() for _, router in engine.routers()]))
        engine.chunks[0].norm.weight.data.nan_to_num_(1.0)
    return [bias.numpy() for bias in seen]


def test_the_selection_bias_stands_still_on_a_skipped_step():
    first, skipped, third = run_distributed(biases_around_a_skipped_step, 1, BIASED)[0]
    assert (first != 0).any() and (first == skipped).all() and (third != skipped).any()
